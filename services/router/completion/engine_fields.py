"""Fields of requests that mean the same in every API: who answers, how tokens are drawn, what is retained.

Agents hint at what they do next: how long a prompt's KV is worth keeping, how urgent a request is, that a
conversation is over. The hints are vLLM's proposed `agent_hint` and Dynamo's `nvext`.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.http.body import ClientModel, Range, StrictModel, at_most_one
from kvferry.services.router.sessions.record import DocumentIds
from kvferry.shared.compression.kept import MAX_KEPT_BINS

INT31, _INT63 = 2**31 - 1, 2**63 - 1

TtlS = Annotated[float, Range(1, 30 * 86400)]
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
MAX_PRIORITY = 1000
Priority = Annotated[int, Range(-MAX_PRIORITY, MAX_PRIORITY)]
Parameters = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        bool | int | float | Annotated[str, StringConstraints(max_length=256)],
    ],
    Field(max_length=32),
]


class KvCompression(StrictModel):
    """A request's own compression: a method, at most one budget, and values for parameters of the method.
    A text is the method alone."""

    method: str | None = None
    token_budget: Annotated[int, Range(1, INT31)] | None = None
    min_token_budget: Annotated[int, Range(1, INT31)] | None = None
    retention: Annotated[float, Range(0, 1, excludes_low=True)] | None = None
    quality: Annotated[float, Range(0, 1, excludes_low=True)] | None = None
    parameters: Parameters | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: object) -> object:
        return {"method": given} if isinstance(given, str) else given

    _one_budget = model_validator(mode="after")(at_most_one("token_budget", "retention", "quality"))


_MAX_KEEP_S = 30 * 86400
_DURATION = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _in_seconds(value: float | str) -> float:
    if isinstance(value, str):
        if (match := _DURATION.fullmatch(value)) is None:
            raise PydanticCustomError("rule", "must be seconds, or a text such as 300s, 5m or 1h")
        value = float(int(match.group(1)) * _UNITS_S[match.group(2)])
    return min(value, _MAX_KEEP_S)


class CacheControl(ClientModel):
    type: str | None = None
    ttl: Annotated[Annotated[float, Range(0)] | str, AfterValidator(_in_seconds)] | None = None


class ContextEdit(ClientModel):
    type: str


class ContextEdits(ClientModel):
    edits: list[ContextEdit] | None = None


class AgentHint(ClientModel):
    cache_control: CacheControl | None = None
    context_management: ContextEdits | None = None


class AgentHints(ClientModel):
    """Dynamo's; the highest priority comes first."""

    priority: Annotated[int, Range(-(2**31), 2**31 - 1)] | None = None


class Nvext(ClientModel):
    agent_hints: AgentHints | None = None
    cache_control: CacheControl | None = None


class EngineFields(ClientModel):
    """Of every request that is answered."""

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Range(0, 2)] | None = None
    top_p: Annotated[float, Range(0, 1)] | None = None
    top_k: Annotated[int, Range(-1, INT31)] | None = None
    min_p: Annotated[float, Range(0, 1)] | None = None
    seed: Annotated[int, Range(-_INT63 - 1, _INT63)] | None = None
    presence_penalty: Annotated[float, Range(-2, 2)] | None = None
    frequency_penalty: Annotated[float, Range(-2, 2)] | None = None
    repetition_penalty: Annotated[float, Range(0, 10, excludes_low=True)] | None = None
    session_ttl_s: TtlS | None = None
    session_pin: bool | None = None
    priority: Priority | None = None
    kv_compression: KvCompression | None = None
    kv_kept_bins: Annotated[int, Range(1, MAX_KEPT_BINS)] | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None
    agent_hint: AgentHint | None = None
    nvext: Nvext | None = None


class ChatFields(ClientModel):
    """Of every request with messages."""

    document_ids: DocumentIds | None = None
    chat_template_kwargs: Parameters | None = None
