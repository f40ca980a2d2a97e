"""Fields of OpenAI's, vLLM's and SGLang's requests that this server does nothing for.

`Ignored` ones do not change the answer; they are accepted and named in the response's `X-Ignored-Fields`.
`Unsupported` ones would change it; they are accepted with the values that ask for nothing, and otherwise
refused by name. A test compares OpenAI's fields with the installed client's types.
"""

from __future__ import annotations

from typing import Annotated, Any

from kvferry.services.router.http.body import Ignored, StrictModel, Unsupported


class OtherFields(StrictModel):
    """What both endpoints of other servers have."""

    # OpenAI
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    verbosity: Ignored = None
    modalities: Annotated[Any, Unsupported(["text"], [])] = None
    audio: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    functions: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    suffix: Annotated[Any, Unsupported("")] = None

    # of both vLLM and SGLang, or of one of them
    request_id: Ignored = None
    rid: Ignored = None
    cache_salt: Ignored = None
    extra_key: Ignored = None
    data_parallel_rank: Ignored = None
    routed_dp_rank: Ignored = None
    disagg_prefill_dp_rank: Ignored = None
    ngram_corpus_id: Ignored = None
    custom_labels: Ignored = None
    stream_interval: Ignored = None
    stream_reasoning: Ignored = None
    length_penalty: Ignored = None
    early_stopping: Ignored = None
    spaces_between_special_tokens: Ignored = None
    truncation_side: Ignored = None
    media_io_kwargs: Ignored = None
    mm_processor_kwargs: Ignored = None
    images_config: Ignored = None
    max_dynamic_patch: Ignored = None
    min_dynamic_patch: Ignored = None
    use_audio_in_video: Ignored = None
    return_mm_kwargs: Ignored = None
    return_token_offsets: Ignored = None
    routed_experts_prompt_start: Ignored = None
    routed_experts_start_len: Ignored = None
    guided_decoding_backend: Ignored = None
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    skip_special_tokens: Annotated[Any, Unsupported(True)] = None
    detokenize: Annotated[Any, Unsupported(True)] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported()] = None
    logprob_token_ids: Annotated[Any, Unsupported([])] = None
    allowed_token_ids: Annotated[Any, Unsupported()] = None
    bad_words: Annotated[Any, Unsupported([])] = None
    logits_processors: Annotated[Any, Unsupported([])] = None
    custom_logit_processor: Annotated[Any, Unsupported()] = None
    custom_params: Annotated[Any, Unsupported({})] = None
    stop_regex: Annotated[Any, Unsupported([], "")] = None
    repetition_detection: Annotated[Any, Unsupported()] = None
    watermarking: Annotated[Any, Unsupported(False)] = None
    lora_path: Annotated[Any, Unsupported()] = None
    session_params: Annotated[Any, Unsupported({})] = None
    input_ids: Annotated[Any, Unsupported()] = None
    return_tokens_as_token_ids: Annotated[Any, Unsupported(False)] = None
    return_prompt_text: Annotated[Any, Unsupported(False)] = None
    return_hidden_states: Annotated[Any, Unsupported(False)] = None
    return_routed_experts: Annotated[Any, Unsupported(False)] = None
    return_cached_tokens_details: Annotated[Any, Unsupported(False)] = None
    return_meta_info: Annotated[Any, Unsupported(False)] = None
    return_prompt_token_ids: Annotated[Any, Unsupported(False)] = None
    kv_transfer_params: Annotated[Any, Unsupported({})] = None
    ec_transfer_params: Annotated[Any, Unsupported({})] = None
    vllm_xargs: Annotated[Any, Unsupported({})] = None
    bootstrap_host: Annotated[Any, Unsupported()] = None
    bootstrap_port: Annotated[Any, Unsupported()] = None
    bootstrap_room: Annotated[Any, Unsupported()] = None


class OtherChatFields(OtherFields):
    """What their chat endpoints have besides."""

    echo: Annotated[Any, Unsupported(False)] = None
    add_generation_prompt: Annotated[Any, Unsupported(True)] = None
    continue_final_message: Annotated[Any, Unsupported(False)] = None
    add_special_tokens: Annotated[Any, Unsupported(False)] = None
    documents: Annotated[Any, Unsupported([])] = None
    chat_template: Annotated[Any, Unsupported()] = None
    task: Annotated[Any, Unsupported()] = None


class OtherTextFields(OtherFields):
    """What their completions endpoints have besides."""

    add_special_tokens: Annotated[Any, Unsupported(True)] = None
