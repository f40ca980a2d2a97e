"""Fields of requests that mean the same in every API: who answers, how tokens are drawn, what is retained."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from kvferry.services.router.completion.hints import HintFields
from kvferry.services.router.http.body import ClientModel, Range, StrictModel, at_most_one
from kvferry.services.router.sessions.record import DocumentIds
from kvferry.shared.compression.kept import MAX_KEPT_BINS

INT31, _INT63 = 2**31 - 1, 2**63 - 1

TtlS = Annotated[float, Range(1, 30 * 86400)]
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Priority = Annotated[int, Range(-1000, 1000)]
Parameters = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        bool | int | float | Annotated[str, StringConstraints(max_length=256)],
    ],
    Field(max_length=32),
]


class KvCompression(StrictModel):
    """A request's own compression: a method, at most one budget, and values for parameters of the method."""

    method: str | None = None
    token_budget: Annotated[int, Range(1, INT31)] | None = None
    min_token_budget: Annotated[int, Range(1, INT31)] | None = None
    retention: Annotated[float, Range(0, 1, excludes_low=True)] | None = None
    quality: Annotated[float, Range(0, 1, excludes_low=True)] | None = None
    parameters: Parameters | None = None

    _one_budget = model_validator(mode="after")(at_most_one("token_budget", "retention", "quality"))


class EngineFields(HintFields):
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


class ChatFields(ClientModel):
    """Of every request with messages."""

    document_ids: DocumentIds | None = None
    chat_template_kwargs: Parameters | None = None
