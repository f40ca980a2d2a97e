"""The objects that go back: completions, stream chunks, models and sessions, in OpenAI's shapes.

Plain dictionaries from plain values; nothing here waits or decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.services.router.session_record import DOCUMENT_PREFIX, SessionSummary
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.model.spec import ModelSpec

Endpoint = Literal["chat", "text"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability.

    Attributes:
        text: what the token adds to the completion.
        offset: where that begins in the completion, in characters.
        top: the most likely alternatives with theirs, best first.
    """

    text: str
    logprob: float
    offset: int
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What every object of one response repeats."""

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


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def logprobs_object(endpoint: Endpoint, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Either endpoint's `logprobs`; None stays null."""
    if entries is None:
        return None
    if endpoint == "chat":
        return {"content": [_chat_logprob(entry) for entry in entries], "refusal": None}
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_text_top(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [_token_object(text, logprob) for text, logprob in entry.top]
    return {**_token_object(entry.text, entry.logprob), "top_logprobs": top}


def _token_object(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text_top(entry: TokenLogprob) -> dict[str, float] | None:
    """Several ids may decode to the same string: the likeliest keeps it."""
    top: dict[str, float] = {}
    for text, logprob in entry.top:
        top.setdefault(text, logprob)
    return top or None


def completion_object(
    envelope: Envelope, choices: list[dict[str, Any]], usage: dict[str, Any], kv: dict[str, Any]
) -> dict[str, Any]:
    return {**envelope.object(chunk=False), "choices": choices, "usage": usage, "kv": kv}


def choice_object(
    endpoint: Endpoint, index: int, text: str, entries: Sequence[TokenLogprob] | None, finish_reason: str
) -> dict[str, Any]:
    content: dict[str, Any] = {"text": text}
    if endpoint == "chat":
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    return {
        "index": index,
        **content,
        "logprobs": logprobs_object(endpoint, entries),
        "finish_reason": finish_reason,
    }


def chunk_choice(
    endpoint: Endpoint,
    index: int,
    text: str,
    entries: Sequence[TokenLogprob] | None,
    finish_reason: str | None,
) -> dict[str, Any]:
    content: dict[str, Any] = {"text": text}
    if endpoint == "chat":
        content = {"delta": {"content": text} if text or finish_reason is None else {}}
    return {
        "index": index,
        **content,
        "logprobs": logprobs_object(endpoint, entries),
        "finish_reason": finish_reason,
    }


def role_choice(index: int) -> dict[str, Any]:
    """A chat stream's first chunk."""
    delta = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def model_object(spec: ModelSpec, created: int) -> dict[str, Any]:
    return {
        "id": spec.name,
        "object": "model",
        "created": created,
        "owned_by": "kvferry",
        "max_model_len": spec.max_model_len,
    }


def method_object(plan: CompressionPlan, *, default: bool) -> dict[str, Any]:
    """A method that requests may name, and how much it keeps where they do not say."""
    parts = {
        "scorer": plan.scorer.name if plan.scorer is not None else None,
        "layer_allocation": plan.layer_allocation.name,
        "representation": plan.representation.name,
        "attention": plan.attention.name,
    }
    return {
        "id": plan.method,
        "object": "method",
        "default": default,
        "token_budget": plan.budget.tokens,
        "retention": plan.budget.retention,
        **parts,
    }


def session_object(key: SessionKey, summary: SessionSummary, history: HistoryInfo) -> dict[str, Any]:
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


def document_object(key: SessionKey, summary: SessionSummary, history: HistoryInfo) -> dict[str, Any]:
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
