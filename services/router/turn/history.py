"""Sessions' KV at the workers: publish what a turn staged, drop what a client deleted.

Called at the end of a turn and by DELETE. KV bytes never pass through the router.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from kvferry.services.router.sessions.redis_store import SessionLease
from kvferry.services.router.turn.attempt import TurnStats
from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.control.messages import CommitTurnRequest, SessionKey
from kvferry.shared.errors import KvferryError

_COMMIT_TIMEOUT_S = 10.0
_DROP_TIMEOUT_S = 2.0

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerHistory:
    """The history at prefill workers, and the KV that decode workers retain between turns."""

    prefill: WorkerPool[PrefillControl]
    decode: WorkerPool[DecodeControl]

    async def publish(self, lease: SessionLease, stats: TurnStats, prompt_token_ids: tuple[int, ...]) -> None:
        """Make what the turn staged the session's history, or drop it where the lease is no longer current.
        Lost history costs a prefill, not the session."""
        worker = self.prefill.worker(stats.prefill_address)
        if worker is None:
            return
        try:
            if await lease.is_current():
                await worker.client.commit_turn(
                    CommitTurnRequest(
                        request_id=stats.worker_request_id,
                        session=lease.key,
                        token_ids=prompt_token_ids + tuple(stats.token_ids),
                    ),
                    timeout_s=_COMMIT_TIMEOUT_S,
                )
            else:
                await worker.client.abort_turn(stats.worker_request_id, timeout_s=_COMMIT_TIMEOUT_S)
                if (decode := self.decode.worker(stats.decode_address)) is not None:
                    await decode.client.drop_session(lease.key, timeout_s=_DROP_TIMEOUT_S)
        except KvferryError as error:
            _logger.warning("history not committed", address=worker.address, error=error.message)

    async def drop(self, session: SessionKey) -> None:
        """Have every worker drop a session; its turns may have moved between them."""
        clients: tuple[DecodeControl | PrefillControl, ...] = (
            *(worker.client for worker in self.prefill.workers()),
            *(worker.client for worker in self.decode.workers()),
        )
        calls = (client.drop_session(session, timeout_s=_DROP_TIMEOUT_S) for client in clients)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, KvferryError):
                _logger.warning("history not dropped", error=result.message)
            elif isinstance(result, BaseException):
                raise result
