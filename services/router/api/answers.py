"""The types of the API's answers, in OpenAI's shapes, as `/openapi.json` shows them, and their
`logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, NotRequired, TypeVar

from typing_extensions import TypedDict

from kvferry.services.router.completion.choice import PromptLogprob, TokenLogprob, ToolCall, Usage
from kvferry.services.router.completion.compression import KvReport

ItemT = TypeVar("ItemT")


class Listing(TypedDict, Generic[ItemT]):
    object: Literal["list"]
    data: list[ItemT]


class Status(TypedDict):
    status: Literal["ok", "ready"]


class Version(TypedDict):
    """`kernels`: by role and op, the kernel paths in use."""

    version: str
    protocol_version: int
    kernels: dict[str, dict[str, list[str]]]


class Capability(TypedDict):
    supported: bool


class Model(TypedDict):
    """A model as OpenAI and as Anthropic describe one.

    `methods`: the compression methods that go with this model and that requests may name; `weights`: how its
    weights are stored, a dtype or a quantisation; `capabilities`: `chat`, `tools`, `required_tools` (calls
    that a request demands), `thinking` and `structured_outputs`.
    """

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    owned_by: str
    max_model_len: int
    max_input_tokens: int
    capabilities: dict[str, Capability]
    weights: str
    methods: list[str]


class Method(TypedDict):
    """A compression method that requests may name, and how much it keeps without a budget in the request."""

    id: str
    object: Literal["method"]
    default: bool
    token_budget: int | None
    retention: float | None
    scorer: str | None
    layer_allocation: str
    representation: str
    attention: str


class Session(TypedDict):
    id: str
    object: Literal["session"]
    tokens: int
    stored_bytes: int
    turns: int
    running: bool
    history_bytes: int
    history_tier: str
    last_plan: dict[str, Any] | None
    expires_at: int


class Document(TypedDict):
    id: str
    object: Literal["document"]
    tokens: int
    stored_bytes: int
    history_bytes: int
    history_tier: str
    kv_compression: dict[str, Any] | None
    created_at: int
    expires_at: int


class Deleted(TypedDict):
    id: str
    object: Literal["session.deleted", "document.deleted"]
    deleted: Literal[True]


class Forgotten(TypedDict):
    """How much of an API key's was deleted."""

    object: Literal["key.forgotten"]
    hash: str
    sessions: int
    documents: int


class _Completion(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    kv: KvReport


class AssistantMessage(TypedDict):
    """`reasoning_content` has the model's thoughts, where its chat template sets them apart."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(_Completion):
    """A whole answer. Streams send `chat.completion.chunk` events with `delta` in place of `message`; the
    last one has `kv`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(TypedDict):
    """`prompt_logprobs`, where the request has it: for each token of the prompt an object of its id and its
    alternatives' with `logprob` and `decoded_token`, null for the first token."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    finish_reason: str | None


class TextCompletion(_Completion):
    """A whole answer. Streams send events of the same shape; the last one has `kv`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(TypedDict):
    """OpenAI's response object, also with the request's other fields. `output` has items of type `reasoning`,
    `message` and `function_call`. Streams send OpenAI's events in OpenAI's order."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    store: bool
    usage: ResponseUsage | None
    kv: KvReport


class AnthropicUsage(TypedDict):
    """`input_tokens` are those that were not cached."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnthropicMessage(TypedDict):
    """Anthropic's message: `content` has blocks of type `thinking`, `text` and `tool_use`. Streams send
    Anthropic's events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage
    kv: KvReport


class TokensCount(TypedDict):
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Example(TypedDict):
    """A body for POST /v1/chat/completions."""

    model: str
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    kv_compression: NotRequired[dict[str, Any]]


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return OpenAI's `logprobs` of a chat's choice."""

    def token(entry: TokenLogprob) -> dict[str, Any]:
        return {"token": entry.text, "logprob": entry.logprob, "bytes": entry.bytes}

    content = [{**token(entry), "top_logprobs": list(map(token, entry.top))} for entry in entries]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return OpenAI's `logprobs` of a text's choice."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        # Several ids may decode to the same string: the value of the likeliest, which comes first, stays.
        "top_logprobs": [
            {top.text: top.logprob for top in (*entry.top, *reversed(entry.top))} or None for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }
