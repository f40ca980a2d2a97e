"""Documents of an API key: texts that its conversations may begin with, prefilled once.

A document's KV is that of a conversation which ends where the document does. It is stored like a session's,
and sessions that name the document continue from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.services.router.completion.prompt import Preamble
from kvferry.services.router.completion.requests import DocumentRequest, KvCompression
from kvferry.services.router.completion.services import Services
from kvferry.services.router.sessions.record import SessionRecord, document_key
from kvferry.services.router.turn.attempt import TurnRequest
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import (
    ContextLengthExceeded,
    DocumentNotFound,
    InvalidRequest,
    SessionNotFound,
)
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class NamedDocuments:
    """The documents that a request names.

    Attributes:
        history: the first one, whose KV the session may begin with.
        prefill_addresses: workers that may have that KV.
        compression: of the first one that has any.
    """

    preamble: Preamble
    history: SessionKey
    prefill_addresses: tuple[str, ...]
    compression: KvCompression | None


class Documents:
    """Documents of all keys."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(
        self, owner: str, document_id: str, request: DocumentRequest, *, model: ModelSpec, request_id: str
    ) -> SessionRecord:
        """Prefill a document and store it, in place of one with this id.

        Raises: InvalidRequest, ContextLengthExceeded, CapacityExceeded, or what ends a turn.
        """
        key = document_key(owner, document_id)
        services = self._services
        token_ids = await services.prompts.document_tokens(request.text)
        if len(token_ids) >= model.max_model_len:
            raise ContextLengthExceeded(
                f"text has {len(token_ids)} tokens; a document must be shorter than the context of "
                f"{model.max_model_len}",
                param="text",
            )
        plan = await services.plans.choose(request.kv_compression, token_ids, model)
        async with services.sessions.lease(key, needs_record=False) as lease:
            before = lease.record
            await services.check_quota(key, is_new=before is None, num_tokens=len(token_ids))
            turn = TurnRequest(
                request_id=request_id,
                model=model,
                prompt_token_ids=token_ids,
                plan=plan,
                sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
                deadline_s=asyncio.get_running_loop().time() + services.config.request_timeout_s,
                session=key,
                prefer_prefill=before.prefill_addresses if before is not None else (),
            )
            stats = await services.runner.run(turn)
            await services.publish(lease, stats, token_ids)
            earlier = before.prefill_addresses if before is not None else ()
            compression = request.kv_compression
            await lease.commit(
                SessionRecord(
                    kind="document",
                    model_fingerprint=model.fingerprint,
                    token_ids=token_ids,
                    text=request.text,
                    turns=1,
                    prefill_addresses=tuple(dict.fromkeys((stats.prefill_address, *earlier))),
                    compression=compression.model_dump(exclude_none=True)
                    if compression is not None
                    else None,
                    created_at_s=services.clock(),
                )
            )
        return await self.get(owner, document_id)

    async def get(self, owner: str, document_id: str) -> SessionRecord:
        """Raises: DocumentNotFound, StoreUnavailable."""
        try:
            return await self._services.sessions.get(document_key(owner, document_id))
        except SessionNotFound:
            raise _not_found(document_id) from None

    async def delete(self, owner: str, document_id: str) -> None:
        """Delete a document. Sessions that began with it keep its text and KV as part of their own.

        Raises: DocumentNotFound, StoreUnavailable.
        """
        key = document_key(owner, document_id)
        try:
            await self._services.sessions.delete(key)
        except SessionNotFound:
            raise _not_found(document_id) from None
        await self._services.drop(key)

    async def named(self, owner: str, document_ids: Sequence[str]) -> NamedDocuments:
        """The documents of a request's `document_ids`, of which there is at least one.

        Raises: InvalidRequest where there is no such document.
        """
        records = []
        for document_id in document_ids:
            try:
                records.append(await self.get(owner, document_id))
            except DocumentNotFound as error:
                raise InvalidRequest(error.message, param="document_ids") from None
        compressions = [record.compression for record in records if record.compression is not None]
        return NamedDocuments(
            preamble=Preamble(
                document_ids=tuple(document_ids), text="\n\n".join(record.text for record in records)
            ),
            history=document_key(owner, document_ids[0]),
            prefill_addresses=records[0].prefill_addresses,
            compression=KvCompression(**compressions[0]) if compressions else None,
        )


def _not_found(document_id: str) -> DocumentNotFound:
    return DocumentNotFound(f"There is no document {document_id!r}")
