"""The parts of the router that requests share, made once by `app.py`, and what requests of every kind do with
them.

Sessions' KV stays at the workers: here a turn's staged history is published and deleted sessions are dropped.
KV bytes never pass through the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvferry.services.router.completion.plans import PlanChooser
from kvferry.services.router.completion.prompt import PromptBuilder
from kvferry.services.router.config import RouterConfig
from kvferry.services.router.sessions.record import is_document
from kvferry.services.router.sessions.redis_store import SessionLease, SessionStore
from kvferry.services.router.turn.attempt import TurnStats
from kvferry.services.router.turn.readiness import Readiness
from kvferry.services.router.turn.turn import TurnRunner
from kvferry.services.router.turn.worker_pool import served_model
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.control.messages import CommitTurnRequest, SessionKey
from kvferry.shared.errors import CapacityExceeded, InvalidRequest, KvferryError, Overloaded
from kvferry.shared.metrics import RouterMetrics
from kvferry.shared.model.spec import ModelSpec

_QUOTA_RETRY_AFTER_S = 60.0
_COMMIT_TIMEOUT_S = 10.0
_DROP_TIMEOUT_S = 2.0

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Services:
    """Attributes: clock: Unix time in seconds."""

    config: RouterConfig
    metrics: RouterMetrics
    clock: Callable[[], float]
    runner: TurnRunner
    readiness: Readiness
    sessions: SessionStore
    prompts: PromptBuilder
    plans: PlanChooser

    def model(self) -> ModelSpec:
        """The model that the workers serve now.

        Raises: Overloaded where workers of both roles have none in common.
        """
        model = served_model(self.runner.prefill, self.runner.decode)
        if model is None:
            raise Overloaded("No ready prefill/decode pair serves the same model")
        return model

    async def check_quota(self, key: SessionKey, *, is_new: bool, num_tokens: int) -> None:
        """Whether the key's owner may store a session or document of this many tokens.

        Checked before a turn runs, so that nothing is computed that cannot be stored. Routers that share a
        Redis count together; two simultaneous requests may both pass.

        Args: num_tokens: its tokens after the turn, as far as they are known.
        Raises:
            InvalidRequest: it is too long by itself.
            CapacityExceeded: with the owner's others it is too much; deleting some of them helps.
        """
        config, documents = self.config, is_document(key)
        what = "documents" if documents else "sessions"
        limit = config.max_documents_per_key if documents else config.max_sessions_per_key
        max_tokens = config.max_history_tokens_per_key
        if max_tokens and num_tokens > max_tokens:
            raise InvalidRequest(
                f"This would be {num_tokens} tokens; all {what} of a key may have {max_tokens} together"
            )
        if not is_new and not max_tokens:
            return
        usage = await self.sessions.usage(key.owner, documents=documents, excluding=key)
        if is_new and usage.num_records >= limit:
            raise CapacityExceeded(
                f"This key has {usage.num_records} {what}; the limit is {limit}, delete some",
                reason=f"{what}_quota",
                retry_after_s=_QUOTA_RETRY_AFTER_S,
            )
        if max_tokens and usage.num_tokens + num_tokens > max_tokens:
            raise CapacityExceeded(
                f"This key's other {what} have {usage.num_tokens} tokens and this one would have "
                f"{num_tokens}; the limit for all is {max_tokens}, delete some",
                reason=f"{what}_tokens_quota",
                retry_after_s=_QUOTA_RETRY_AFTER_S,
            )

    async def publish(self, lease: SessionLease, stats: TurnStats, prompt_token_ids: tuple[int, ...]) -> None:
        """Make what the turn staged the session's history, or drop it where the lease is no longer current.
        Lost history costs a prefill, not the session."""
        worker = self.runner.prefill.worker(stats.prefill_address)
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
                if (decode := self.runner.decode.worker(stats.decode_address)) is not None:
                    await decode.client.drop_session(lease.key, timeout_s=_DROP_TIMEOUT_S)
        except KvferryError as error:
            _logger.warning("history not committed", address=worker.address, error=error.message)

    async def drop(self, session: SessionKey) -> None:
        """Have every worker drop a session's KV; its turns may have moved between them."""
        clients: tuple[DecodeControl | PrefillControl, ...] = (
            *(worker.client for worker in self.runner.prefill.workers()),
            *(worker.client for worker in self.runner.decode.workers()),
        )
        calls = (client.drop_session(session, timeout_s=_DROP_TIMEOUT_S) for client in clients)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, KvferryError):
                _logger.warning("history not dropped", error=result.message)
            elif isinstance(result, BaseException):
                raise result
