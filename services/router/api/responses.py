"""The objects of the API's answers, in OpenAI's shapes: their types, which `/openapi.json` shows, and how
each is made.

Nothing here waits or decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NotRequired, TypeVar

from typing_extensions import TypedDict

from kvferry.services.router.completion.choice import TokenLogprob
from kvferry.services.router.completion.kv_report import KvReport, Usage
from kvferry.services.router.sessions.record import DOCUMENT_PREFIX, SessionSummary
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.model.spec import ModelSpec

Endpoint = Literal["chat", "text"]
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


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


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
    turns: int
    history_bytes: int
    history_tier: str
    last_plan: dict[str, Any] | None
    expires_at: int


class Document(TypedDict):
    id: str
    object: Literal["document"]
    tokens: int
    history_bytes: int
    history_tier: str
    kv_compression: dict[str, Any] | None
    created_at: int
    expires_at: int


class Deleted(TypedDict):
    id: str
    object: Literal["session.deleted", "document.deleted"]
    deleted: Literal[True]


class _Completion(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    kv: KvReport


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


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
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class TextCompletion(_Completion):
    """A whole answer. Streams send events of the same shape; the last one has `kv`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Example(TypedDict):
    """A body for POST /v1/chat/completions."""

    model: str
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    kv_compression: NotRequired[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """The fields that every object of one response repeats."""

    endpoint: Endpoint
    id: str
    created: int
    model: str
    system_fingerprint: str

    def object(self, *, chunk: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": chat if self.endpoint == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def choice_object(
    endpoint: Endpoint,
    index: int,
    text: str,
    entries: Sequence[TokenLogprob] | None,
    finish_reason: str | None,
    *,
    chunk: bool,
) -> dict[str, Any]:
    """A choice of a whole answer, or what a chunk adds to it."""
    content: dict[str, Any] = {"text": text}
    if endpoint == "chat" and chunk:
        content = {"delta": {"content": text} if text or finish_reason is None else {}}
    elif endpoint == "chat":
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    logprobs = None if entries is None else _logprobs(endpoint, entries)
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def role_choice(index: int) -> dict[str, Any]:
    """A chat stream's first chunk."""
    delta = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(endpoint: Endpoint, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    if endpoint == "chat":
        content = [
            {
                **_token(entry.text, entry.logprob),
                "top_logprobs": [_token(text, logprob) for text, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_text_top(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _text_top(entry: TokenLogprob) -> dict[str, float] | None:
    """Several ids may decode to the same string: the likeliest keeps it."""
    top: dict[str, float] = {}
    for text, logprob in entry.top:
        top.setdefault(text, logprob)
    return top or None


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def model_object(spec: ModelSpec, created: int) -> Model:
    return {
        "id": spec.name,
        "object": "model",
        "created": created,
        "owned_by": "kvferry",
        "max_model_len": spec.max_model_len,
    }


def method_object(plan: CompressionPlan, *, default: bool) -> Method:
    return {
        "id": plan.method,
        "object": "method",
        "default": default,
        "token_budget": plan.budget.tokens,
        "retention": plan.budget.retention,
        "scorer": plan.scorer.name if plan.scorer is not None else None,
        "layer_allocation": plan.layer_allocation.name,
        "representation": plan.representation.name,
        "attention": plan.attention.name,
    }


def session_object(key: SessionKey, summary: SessionSummary, history: HistoryInfo) -> Session:
    return {
        "id": key.session_id,
        "object": "session",
        "tokens": summary.num_tokens,
        "turns": summary.turns,
        "history_bytes": history.size_bytes,
        "history_tier": history.tier,
        "last_plan": summary.last_plan,
        "expires_at": int(summary.expires_at_s),
    }


def document_object(key: SessionKey, summary: SessionSummary, history: HistoryInfo) -> Document:
    return {
        "id": key.session_id.removeprefix(DOCUMENT_PREFIX),
        "object": "document",
        "tokens": summary.num_tokens,
        "history_bytes": history.size_bytes,
        "history_tier": history.tier,
        "kv_compression": summary.compression,
        "created_at": int(summary.created_at_s),
        "expires_at": int(summary.expires_at_s),
    }
