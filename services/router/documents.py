"""Documents of an API key: texts that its conversations may begin with, run once.

A document's KV is that of a conversation which ends where the document does; it is kept like a session's, and
sessions that name it continue from it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.services.router.history import WorkerHistory
from kvferry.services.router.placement import Role
from kvferry.services.router.plans import PlanChoice
from kvferry.services.router.prompt import Preamble, PromptBuilder
from kvferry.services.router.quota import KeyQuota
from kvferry.services.router.schemas import DocumentRequest, KvCompression
from kvferry.services.router.session_record import SessionRecord, SessionSummary, document_key
from kvferry.services.router.sessions import SessionStore
from kvferry.services.router.turn import TurnRunner
from kvferry.services.router.turn_state import TurnProgress, TurnRequest, TurnStats
from kvferry.shared.control.messages import FinishReason, SessionKey
from kvferry.shared.errors import (
    ContextLengthExceeded,
    DocumentNotFound,
    InvalidRequest,
    KvferryError,
    SessionNotFound,
)
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken, SamplingParams


class _Unheard:
    """The sink of a turn whose one token nobody wants."""

    def admitted(self) -> None:
        pass

    def token(self, token: SampledToken, stats: TurnStats) -> bool:
        return False

    def finished(self, reason: FinishReason, stats: TurnStats) -> None:
        pass

    def cut_off(self, error: KvferryError) -> None:
        pass

    def recovered(self, role: Role) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class NamedDocuments:
    """The documents that a request names.

    Attributes:
        history: whose KV its session may begin with: the first one's.
        prefill_addresses: workers that may hold it.
        compression: what the first one that asks for some asks for.
    """

    preamble: Preamble
    history: SessionKey
    prefill_addresses: tuple[str, ...]
    compression: KvCompression | None


@dataclass(frozen=True, kw_only=True)
class DocumentService:
    """Documents of all keys."""

    runner: TurnRunner
    sessions: SessionStore
    history: WorkerHistory
    prompts: PromptBuilder
    plans: PlanChoice
    quota: KeyQuota
    request_timeout_s: float
    clock: Callable[[], float]

    async def create(
        self, owner: str, document_id: str, request: DocumentRequest, *, model: ModelSpec, request_id: str
    ) -> SessionRecord:
        """Run a document and keep it; one of this id is replaced.

        Raises: InvalidRequest, ContextLengthExceeded, CapacityExceeded, or what ends a turn.
        """
        key = document_key(owner, document_id)
        token_ids = await self.prompts.document_tokens(request.text)
        if len(token_ids) >= model.max_model_len:
            raise ContextLengthExceeded(
                f"text has {len(token_ids)} tokens; a document must be shorter than the context of "
                f"{model.max_model_len}",
                param="text",
            )
        chosen = await self.plans.choose(request.kv_compression, token_ids, model)
        async with self.sessions.lease(key, needs_record=False) as lease:
            before = lease.record
            await self.quota.check(self.sessions, key, is_new=before is None, num_tokens=len(token_ids))
            turn = TurnRequest(
                request_id=request_id,
                model=model,
                prompt_token_ids=token_ids,
                plan=chosen.plan,
                sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
                deadline_s=asyncio.get_running_loop().time() + self.request_timeout_s,
                session=key,
                prefer_prefill=before.prefill_addresses if before is not None else (),
            )
            stats = await self.runner.run(TurnProgress(turn, _Unheard()))
            await self.history.publish(lease, stats, token_ids)
            earlier = before.prefill_addresses if before is not None else ()
            await lease.commit(
                SessionRecord(
                    kind="document",
                    model_fingerprint=model.fingerprint,
                    token_ids=token_ids,
                    text=request.text,
                    turns=1,
                    prefill_addresses=tuple(dict.fromkeys((stats.prefill_address, *earlier))),
                    compression=_written(request.kv_compression),
                    created_at_s=self.clock(),
                )
            )
        return await self.get(owner, document_id)

    async def get(self, owner: str, document_id: str) -> SessionRecord:
        """Raises: DocumentNotFound, StoreUnavailable."""
        try:
            return await self.sessions.get(document_key(owner, document_id))
        except SessionNotFound:
            raise _not_found(document_id) from None

    async def owned_by(self, owner: str) -> list[tuple[SessionKey, SessionSummary]]:
        return await self.sessions.owned_by(owner, documents=True)

    async def delete(self, owner: str, document_id: str) -> None:
        """Forget a document. Sessions that began with it keep what they said and its KV among theirs.

        Raises: DocumentNotFound, StoreUnavailable.
        """
        key = document_key(owner, document_id)
        try:
            await self.sessions.delete(key)
        except SessionNotFound:
            raise _not_found(document_id) from None
        await self.history.drop(key)

    async def named(self, owner: str, document_ids: Sequence[str]) -> NamedDocuments | None:
        """What a request's `document_ids` stand for; None without any.

        Raises: InvalidRequest where there is no such document.
        """
        if not document_ids:
            return None
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


def _written(compression: KvCompression | None) -> dict[str, Any] | None:
    return None if compression is None else compression.model_dump(exclude_none=True)


def _not_found(document_id: str) -> DocumentNotFound:
    return DocumentNotFound(f"There is no document {document_id!r}")
