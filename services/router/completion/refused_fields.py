"""Fields of OpenAI's, vLLM's and SGLang's requests that would change the answer, and that this server lacks.

They are accepted with the values that ask for nothing, and otherwise refused by name. All other fields that
no type here has are ignored, and named in the answer's `X-Ignored-Fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

from kvferry.services.router.http.body import ClientModel, Unsupported


class RefusedFields(ClientModel):
    """Of both endpoints."""

    # OpenAI
    modalities: Annotated[Any, Unsupported(["text"], [])] = None
    audio: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    functions: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    suffix: Annotated[Any, Unsupported("")] = None

    # of both vLLM and SGLang, or of one of them
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


class RefusedChatFields(RefusedFields):
    """Of the chat endpoint besides."""

    echo: Annotated[Any, Unsupported(False)] = None
    add_special_tokens: Annotated[Any, Unsupported(False)] = None
    documents: Annotated[Any, Unsupported([])] = None
    chat_template: Annotated[Any, Unsupported()] = None
    task: Annotated[Any, Unsupported()] = None


class RefusedTextFields(RefusedFields):
    """Of the completions endpoint besides; the last ones are the chat endpoint's."""

    add_special_tokens: Annotated[Any, Unsupported(True)] = None
    messages: Annotated[Any, Unsupported()] = None
    max_completion_tokens: Annotated[Any, Unsupported()] = None
    tools: Annotated[Any, Unsupported([])] = None
    document_ids: Annotated[Any, Unsupported([])] = None
