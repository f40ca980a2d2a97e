"""Fields of other servers' requests that would change the answer, and that this server lacks.

Each has the values that ask for nothing, which are accepted; with others the request is refused by the
field's name. All other fields that no type here has are ignored, and named in the answer's
`X-Ignored-Fields`.
"""

from __future__ import annotations

from kvferry.services.router.http.body import Refused

_OF_COMPLETIONS: Refused = {
    # OpenAI
    "modalities": (["text"], []),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    **dict.fromkeys(("audio", "moderation", "web_search_options"), ()),
    # of both vLLM and SGLang, or of one of them
    **dict.fromkeys(
        (
            *("use_beam_search", "watermarking", "return_tokens_as_token_ids", "return_prompt_text"),
            *("return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
            *("return_meta_info", "return_prompt_token_ids"),
        ),
        (False,),
    ),
    **dict.fromkeys(("skip_special_tokens", "detokenize"), (True,)),
    **dict.fromkeys(("logprob_token_ids", "bad_words", "logits_processors"), ([],)),
    "stop_regex": ([], ""),
    **dict.fromkeys(
        ("custom_params", "session_params", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"), ({},)
    ),
    **dict.fromkeys(
        (
            *("truncate_prompt_tokens", "allowed_token_ids", "custom_logit_processor", "lora_path"),
            *("repetition_detection", "input_ids", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
            *("guided_whitespace_pattern", "structural_tag"),
        ),
        (),
    ),
}

OF_CHATS: Refused = {
    **_OF_COMPLETIONS,
    **dict.fromkeys(("echo", "add_special_tokens"), (False,)),
    "documents": ([],),
    **dict.fromkeys(("chat_template", "task"), ()),
}

OF_TEXTS: Refused = {
    **_OF_COMPLETIONS,
    "add_special_tokens": (True,),
    # the chat endpoint's
    **dict.fromkeys(("messages", "max_completion_tokens"), ()),
    **dict.fromkeys(("tools", "document_ids"), ([],)),
}

OF_RESPONSES: Refused = {
    "truncation": ("disabled", "auto"),
    "background": (False,),
    "context_management": ([],),
    **dict.fromkeys(("session_id", "conversation", "prompt", "moderation"), ()),
}

OF_TOKEN_COUNTS: Refused = {"mcp_servers": ([],)}
OF_MESSAGES: Refused = {**OF_TOKEN_COUNTS, "container": ()}
