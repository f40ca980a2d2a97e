"""Shared by all turns: the pools of workers, tasks that outlive requests, and calls beside turns.

`turn.py` runs one turn. Here workers are asked what they have stored of a prompt, and told to publish or drop
it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import xxhash

from kvferry.services.router.turn.attempt import TurnStats
from kvferry.services.router.turn.worker_pool import ClientT, Worker, WorkerPool, fits
from kvferry.shared.control.calls import DecodeControl, PrefillControl
from kvferry.shared.control.messages import CommitTurnRequest, PrefixRequest, SessionKey
from kvferry.shared.errors import KvferryError, Overloaded
from kvferry.shared.history.records import block_hashes
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.telemetry.metrics import RouterMetrics

_COMMIT_TIMEOUT_S = 10.0
_DROP_TIMEOUT_S = 2.0
_PREFIX_TIMEOUT_S = 0.5

_Answer = TypeVar("_Answer")

_logger = structlog.get_logger(__name__)


class BackgroundTasks:
    """Tasks that outlive the request that started them. Logs what they raise, and ends them at shutdown."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait for the tasks, then cancel those that are left."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=timeout_s + 1.0)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, KvferryError):
            _logger.warning("background task failed", task=task.get_name(), error=error.message)
        elif error is not None:
            _logger.error("background task failed unexpectedly", task=task.get_name(), exc_info=error)


@dataclass(kw_only=True)
class TurnRunner:
    """The workers of all turns, what is asked of them beside turns, and the policy of retries.

    Attributes:
        max_recoveries: how many lost workers one turn may survive.
        backoff_s: the first pause before a replay; doubles with each, times 0.5 to 1.5 at random.
        recovery_wait_s: how long a replay waits for a ready worker.
        last_success_s: when a turn last finished, on the clock of `time.monotonic`.
    """

    prefill: WorkerPool[PrefillControl]
    decode: WorkerPool[DecodeControl]
    tasks: BackgroundTasks
    metrics: RouterMetrics
    max_recoveries: int
    backoff_s: float
    recovery_wait_s: float
    last_success_s: float | None = None

    def model(self) -> ModelSpec:
        """Return the model that the workers serve now.

        Raises: Overloaded where workers of both roles have none in common.
        """
        model = served_model(self.prefill, self.decode)
        if model is None:
            raise Overloaded(
                "No ready prefill/decode pair serves the same model"
                f"{self.prefill.misunderstood or self.decode.misunderstood}",
                retry_after_s=self.prefill.status_interval_s,
            )
        return model

    async def publish(
        self,
        session: SessionKey,
        stats: TurnStats,
        prompt: tuple[int, ...],
        *,
        is_current: bool,
        pin: bool = False,
    ) -> bool:
        """Make what the turn staged the session's history, or drop it if the session's lease is no longer
        current. Lost history costs a prefill, not the session. Returns whether it was published."""
        if (worker := self.prefill.worker(stats.prefill_address)) is None:
            return False
        request_id, token_ids = stats.worker_request_id, prompt + tuple(stats.token_ids)
        commit = CommitTurnRequest(request_id=request_id, session=session, token_ids=token_ids, pin=pin)
        try:
            if is_current:
                await worker.client.commit_turn(commit, timeout_s=_COMMIT_TIMEOUT_S)
                return True
            await worker.client.abort_turn(request_id, timeout_s=_COMMIT_TIMEOUT_S)
            decode = self.decode.worker(stats.decode_address)
            if decode is not None and not session.is_implicit:
                await decode.client.drop_session(session, timeout_s=_DROP_TIMEOUT_S)
        except KvferryError as error:
            log = _logger.debug if session.is_implicit else _logger.warning
            log("history not committed", address=worker.address, error=error.message)
        return False

    async def with_prefix(
        self, owner: str, prompt: tuple[int, ...], fingerprint: str, *, prefer: tuple[str, ...] = ()
    ) -> tuple[str, ...]:
        """Return the prefill workers that have stored a prefix of the prompt for the owner, the longest
        first. If none has, return `prefer`, or the least loaded of those that were asked if there are others.

        They are asked because they also store other routers' prompts. One that does not answer soon counts as
        having none. A single worker is not asked. Of many workers, the few near the prompt's first block are
        asked, and prompts go to them: the cost of a request does not grow with the workers.
        """
        num_ready = len(self.prefill.ready_workers(fingerprint))
        hashes = tuple(block_hashes(prompt, len(prompt)))
        if num_ready == 1 or not hashes:
            return prefer
        place = xxhash.xxh3_64_intdigest(f"{owner} {hashes[0]}".encode())
        workers = self.prefill.near(place, fingerprint=fingerprint)
        request = PrefixRequest(owner=owner, block_hashes=hashes)
        answers = await _asked(
            workers, lambda client: client.prefix_info(request, timeout_s=_PREFIX_TIMEOUT_S)
        )
        stored = {address: answer.num_tokens for address, answer in answers.items() if answer.num_tokens}
        found = tuple(sorted(stored, key=stored.__getitem__, reverse=True))
        if found or prefer or len(workers) == num_ready:
            return found or prefer
        return (workers[0].address,)

    async def drop(self, session: SessionKey, *, addresses: Iterable[str] | None = None) -> None:
        """Have workers drop a session's KV.

        Args: addresses: of those that may have it; None: every worker is told, however many there are.
        """
        pools: tuple[WorkerPool[Any], ...] = (self.prefill, self.decode)
        if addresses is None:
            workers = [worker for pool in pools for worker in pool.workers()]
        else:
            known = [pool.worker(address) for address in addresses for pool in pools]
            workers = [worker for worker in known if worker is not None]
        await _asked(
            workers,
            lambda client: client.drop_session(session, timeout_s=_DROP_TIMEOUT_S),
            failed="history not dropped",
        )


def shared_version(
    prefill: WorkerPool[Any], decode: WorkerPool[Any], fingerprint: str, *, prefer: Sequence[str] = ()
) -> int | None:
    """Return the block protocol in which a turn's two workers will exchange KV, which must be the same; None
    if no pair of ready workers has one. During an upgrade there may be several: choose that of the first
    preferred prefill worker, else the one of which there are most pairs, the newest of equals."""
    at_prefill, at_decode = prefill.versions(fingerprint), decode.versions(fingerprint)
    pairs = {version: min(count, at_decode[version]) for version, count in at_prefill.items()}
    shared = {version: count for version, count in pairs.items() if count}
    for address in prefer if len(shared) > 1 else ():
        worker = prefill.worker(address)
        if worker is not None and worker.version in shared and fits(worker, fingerprint, None):
            return worker.version
    return max(shared, key=lambda version: (shared[version], version), default=None)


def served_model(
    prefill: WorkerPool[Any], decode: WorkerPool[Any], *, ready_only: bool = False
) -> ModelSpec | None:
    """Return the model that workers of both roles have; during a rollout, the one that more of them have.

    Args: ready_only: ignore workers that are not ready now.
    """
    for only in (True,) if ready_only else (True, False):
        prefill_models, decode_models = prefill.models(ready_only=only), decode.models(ready_only=only)
        at_decode = Counter({spec.fingerprint: count for spec, count in decode_models.items()})
        shared = [
            spec
            for spec in prefill_models
            if at_decode[spec.fingerprint]
            and not (only and shared_version(prefill, decode, spec.fingerprint) is None)
        ]
        if shared:
            widths = {spec: prefill_models[spec] + at_decode[spec.fingerprint] for spec in shared}
            return max(shared, key=lambda spec: (widths[spec], spec.fingerprint))
    return None


async def _asked(
    workers: Sequence[Worker[ClientT]],
    call: Callable[[ClientT], Awaitable[_Answer]],
    *,
    failed: str = "",
) -> dict[str, _Answer]:
    """Return the workers' answers by address, without those that do not answer.

    Args: failed: what the log says of those; empty for nothing.
    """
    calls = [call(worker.client) for worker in workers]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    answered: dict[str, _Answer] = {}
    for worker, answer in zip(workers, answers, strict=True):
        if not isinstance(answer, BaseException):
            answered[worker.address] = answer
        elif failed:
            _logger.warning(failed, address=worker.address, error=str(answer))
    return answered
