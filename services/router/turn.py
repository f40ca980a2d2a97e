"""One turn's life: a prompt's tokens in, a completion's tokens out, each exactly once, whatever workers die.

Reserves at decode, runs prefill towards that reservation and relays the tokens; where a worker is lost,
replays the prompt and the tokens already delivered on another one. Knows tokens only: text, HTTP and
sessions' records are its callers' matter.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import structlog

from kvferry.services.router.attempt import Attempt
from kvferry.services.router.placement import Role, WorkerPool
from kvferry.services.router.tasks import BackgroundTasks
from kvferry.services.router.turn_state import CUT_OFF_S, TurnProgress, TurnStats
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    KvferryError,
    Overloaded,
    SessionBusy,
    WorkerUnavailable,
)

_ABORT_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class TurnRunner:
    """Runs turns: what each needs of its router, and how stubborn it is.

    Attributes:
        max_recoveries: lost workers that one turn may survive.
        backoff_s: the first pause before a replay; doubles with each, times 0.5 to 1.5 at random.
        recovery_wait_s: how long a replay awaits a ready worker.
    """

    prefill: WorkerPool[PrefillControl]
    decode: WorkerPool[DecodeControl]
    tasks: BackgroundTasks
    max_recoveries: int = 3
    backoff_s: float = 0.25
    recovery_wait_s: float = 20.0

    async def run(self, progress: TurnProgress) -> TurnStats:
        """Run a turn to its end: after `sink.finished`, also until generated KV is back at prefill.

        Cancelling it frees everything that workers hold for it. Where the deadline, or `progress.cut`, comes
        in the midst of the completion, what was delivered goes home in bounded time.

        Raises: any KvferryError that ends the turn before `sink.finished`; none after it.
        """
        loop = asyncio.get_running_loop()
        late = DeadlineExceeded("The request's deadline passed before its completion ended")
        try:
            async with asyncio.timeout_at(progress.request.deadline_s + CUT_OFF_S) as limit:

                async def shorten() -> None:
                    await progress.was_cut.wait()
                    limit.reschedule(loop.time() + CUT_OFF_S)

                def end() -> None:
                    if not progress.cut(late):
                        limit.reschedule(loop.time())

                shortening = asyncio.create_task(shorten())
                deadline = loop.call_at(progress.request.deadline_s, end)
                try:
                    await _Turn(self, progress).run()
                finally:
                    deadline.cancel()
                    shortening.cancel()
        except TimeoutError:
            if not progress.finished:
                raise late from None
        return progress.stats


class _Turn:
    """The attempts of one turn.

    attempt ──tokens──► finished ──► history home ──► done
      ▲   │ worker lost, transfer failed
      └───┘ backoff; prompt + delivered tokens are the next attempt's prompt
    """

    def __init__(self, runner: TurnRunner, progress: TurnProgress) -> None:
        self._runner = runner
        self._progress = progress
        self._request = progress.request
        self._avoid: dict[Role, set[str]] = {"prefill": set(), "decode": set()}
        self._log = structlog.get_logger(__name__).bind(request_id=progress.request.request_id)

    async def run(self) -> None:
        while True:
            attempt = self._next_attempt()
            try:
                await attempt.run()
                return
            except KvferryError as error:
                self._discard(attempt)
                if self._progress.finished:
                    return
                if self._progress.was_cut.is_set():
                    raise
                if not self._tries_elsewhere(error, attempt):
                    await self._recover(error, attempt)
            except asyncio.CancelledError:
                self._discard(attempt)
                raise
            if (reason := self._progress.end) is not None:
                self._progress.finish(reason)
                return

    def _next_attempt(self) -> Attempt:
        fingerprint = self._request.model.fingerprint
        attempt = Attempt(
            self._runner.prefill.choose(
                fingerprint=fingerprint, prefer=self._request.prefer_prefill, avoid=self._avoid["prefill"]
            ),
            self._runner.decode.choose(
                fingerprint=fingerprint, prefer=self._request.prefer_decode, avoid=self._avoid["decode"]
            ),
            self._progress,
        )
        self._progress.stats.prefill_address = attempt.prefill.address
        self._progress.stats.decode_address = attempt.decode.address
        self._progress.stats.worker_request_id = attempt.worker_request_id
        return attempt

    def _tries_elsewhere(self, error: KvferryError, attempt: Attempt) -> bool:
        """Whether another worker may have the room that this one lacks; it is not a recovery."""
        if not _is_refusal(error) or self._progress.stats.token_ids or attempt.failed_role is None:
            return False
        pool, address = self._failed(attempt)
        avoid = self._avoid[attempt.failed_role]
        avoid.add(address)
        others = pool.ready_workers(self._request.model.fingerprint)
        return any(worker.address not in avoid for worker in others)

    async def _recover(self, error: KvferryError, attempt: Attempt) -> None:
        """Pause and wait for workers, or raise `error` where a replay would not help."""
        stats, runner = self._progress.stats, self._runner
        refused = _is_refusal(error) and not stats.token_ids
        final = not error.retryable or isinstance(error, DeadlineExceeded | SessionBusy) or refused
        if final or attempt.failed_role is None or stats.replays >= runner.max_recoveries:
            raise error
        pool, address = self._failed(attempt)
        self._avoid[attempt.failed_role].add(address)
        if isinstance(error, WorkerUnavailable):
            pool.report_lost(address, attempt.instance_ids[attempt.failed_role])
        pause_s = runner.backoff_s * 2**stats.replays * random.uniform(0.5, 1.5)
        self._progress.recover(attempt.failed_role)
        self._log.warning(
            "turn resumes on another worker",
            role=attempt.failed_role,
            address=address,
            error=error.message,
            num_tokens=len(stats.token_ids),
            replay=stats.replays,
        )
        if self._progress.end is not None:
            return
        await asyncio.sleep(pause_s)
        fingerprint = self._request.model.fingerprint
        await runner.prefill.wait_ready(fingerprint, timeout_s=runner.recovery_wait_s)
        await runner.decode.wait_ready(fingerprint, timeout_s=runner.recovery_wait_s)

    def _failed(self, attempt: Attempt) -> tuple[WorkerPool[PrefillControl] | WorkerPool[DecodeControl], str]:
        if attempt.failed_role == "prefill":
            return self._runner.prefill, attempt.prefill.address
        return self._runner.decode, attempt.decode.address

    def _discard(self, attempt: Attempt) -> None:
        """Have prefill drop what the attempt staged. Nobody waits for it."""
        if self._request.session is None or self._progress.finished:
            return
        client, request_id = attempt.prefill.client, attempt.worker_request_id

        async def abort() -> None:
            await client.abort_turn(request_id, timeout_s=_ABORT_TIMEOUT_S)

        self._runner.tasks.start(abort(), name="abort turn")


def _is_refusal(error: KvferryError) -> bool:
    """The worker is well and has no room now; the client is told when to come back."""
    overloaded = isinstance(error, Overloaded) and not isinstance(error, WorkerUnavailable)
    return overloaded or isinstance(error, CapacityExceeded)
