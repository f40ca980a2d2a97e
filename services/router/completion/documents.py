"""Documents of an API key: texts that its conversations may begin with, prefilled once.

A document's KV is that of a conversation which ends where the document does. It is stored like a session's,
and sessions that name the document continue from it. A deleted one stays part of the sessions that began with
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import StringConstraints

from kvferry.services.router.completion.engine_fields import KvCompression, Priority, TtlS
from kvferry.services.router.completion.prompts import Preamble, Prompt
from kvferry.services.router.completion.requests import ChatRequest
from kvferry.services.router.completion.services import Services
from kvferry.services.router.http.body import StrictModel
from kvferry.services.router.http.large_work import BodyWork
from kvferry.services.router.sessions.record import SessionId, SessionRecord
from kvferry.services.router.sessions.store import document_key
from kvferry.services.router.turn.attempt import TurnRequest
from kvferry.services.router.turn.turn import Turn
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import ContextLengthExceeded, DocumentNotFound, InvalidRequest
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SamplingParams


class DocumentRequest(StrictModel):
    """POST /v1/documents."""

    text: Annotated[str, StringConstraints(min_length=1)]
    id: SessionId | None = None
    ttl_s: TtlS | None = None
    pin: bool = False
    priority: Priority = 0
    kv_compression: KvCompression | None = None


@dataclass(frozen=True, kw_only=True)
class NamedDocuments:
    """The documents that a request names.

    Attributes:
        preamble: None leaves the session's; that of no documents means none.
        history: the first one, whose KV the session may begin with.
        prefill_addresses: workers that may have that KV.
        compression: of the first one that has any.
    """

    preamble: Preamble | None = None
    history: SessionKey | None = None
    prefill_addresses: tuple[str, ...] = ()
    compression: KvCompression | None = None


async def create(
    services: Services, key: SessionKey, body: DocumentRequest, work: BodyWork, request_id: str
) -> None:
    """Prefill a document and store it, in place of one with this key.

    Raises: InvalidRequest, ContextLengthExceeded, CapacityExceeded, or what ends a turn.
    """
    model, compression = services.runner.model(), body.kv_compression
    token_ids = await services.prompts.document_tokens(body.text, model, work)
    if len(token_ids) >= model.max_model_len:
        raise ContextLengthExceeded(
            f"text has {len(token_ids)} tokens; a document must be shorter than the context of "
            f"{model.max_model_len}",
            param="text",
        )
    plan = (await services.plans.choose(compression, token_ids, model)).plan
    async with services.sessions.lease(key, needs_record=False) as lease:
        earlier = lease.record.prefill_addresses if lease.record is not None else ()
        record = SessionRecord(
            kind="document",
            model_fingerprint=model.fingerprint,
            token_ids=token_ids,
            text=body.text,
            turns=1,
            compression=compression.model_dump(exclude_none=True) if compression is not None else None,
            created_at_s=services.clock(),
            ttl_s=body.ttl_s or 0.0,
            pin=body.pin,
        )
        await services.sessions.check_quota(lease, services.config, record)
        turn = TurnRequest(
            request_id=request_id,
            model=model,
            prompt_token_ids=token_ids,
            plan=plan,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            deadline_s=asyncio.get_running_loop().time() + services.config.request_timeout_s,
            owner=key.owner,
            session=key,
            prefer_prefill=earlier,
            priority=body.priority,
        )
        stats = await Turn(services.runner, turn).run()
        addresses = tuple(dict.fromkeys((stats.prefill_address, *earlier)))
        is_current = False
        try:
            is_current = await lease.commit(replace(record, prefill_addresses=addresses))
        finally:
            await services.runner.publish(key, stats, token_ids, is_current=is_current, pin=body.pin)


async def named(services: Services, owner: str, document_ids: Sequence[str]) -> NamedDocuments:
    """Return the documents of a request's `document_ids`.

    Raises: InvalidRequest where there is no such document.
    """
    if not document_ids:
        return NamedDocuments(preamble=Preamble())
    keys = [document_key(owner, document_id) for document_id in document_ids]
    try:
        records = [await services.sessions.get(key) for key in keys]
    except DocumentNotFound as error:
        raise InvalidRequest(error.message, param="document_ids") from None
    compressions = [record.compression for record in records if record.compression is not None]
    return NamedDocuments(
        preamble=Preamble(
            document_ids=tuple(document_ids), text="\n\n".join(record.text for record in records)
        ),
        history=keys[0],
        prefill_addresses=records[0].prefill_addresses,
        compression=KvCompression(**compressions[0]) if compressions else None,
    )


async def first_prompt(
    services: Services, owner: str, work: BodyWork, request: ChatRequest, model: ModelSpec
) -> Prompt:
    """Build the prompt of a chat without a session, whose tokens are counted.

    Raises: InvalidRequest with `param`.
    """
    documents = await named(services, owner, request.document_ids or ())
    return await services.prompts.build(request, None, model, work, documents.preamble, is_counted=True)
