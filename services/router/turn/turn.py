"""One turn: a prompt's tokens in, the completion's tokens out, each exactly once, whichever workers are lost.

A turn is an async generator. If a worker is lost it replays the prompt and the tokens already delivered on
another one: as one prompt if that gives the same KV; otherwise decode draws the delivered tokens again, so
that a lossy method gives the same answer as without the loss. It handles tokens only; `completion.py` makes
text of them and updates the session.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import structlog

from kvferry.services.router.turn.attempt import (
    Admitted,
    Attempt,
    Finished,
    PromptShare,
    TurnEvent,
    TurnRequest,
    TurnStats,
)
from kvferry.services.router.turn.runner import TurnRunner, shared_version
from kvferry.services.router.turn.worker_pool import Role, Worker, WorkerPool
from kvferry.shared.control.calls import DecodeControl
from kvferry.shared.control.messages import FinishReason, FirstToken, SharedStart
from kvferry.shared.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    HistoryMiss,
    KvferryError,
    LeaseExpired,
    Overloaded,
    SessionBusy,
    WorkerUnavailable,
)
from kvferry.shared.process.draining import REASON
from kvferry.shared.sampling.params import SampledToken

_ABORT_TIMEOUT_S = 2.0


class Turn:
    """The attempts of one turn.

        attempt ──tokens──► finished ──► history returned ──► done
          ▲   │ worker lost, transfer failed
          └───┘ backoff; the next attempt has the delivered tokens in its prompt, or draws them again

    A turn that is one of several choices begins with the prompt that the first one has brought to decode, or
    lets the others begin with its own.

    Attributes:
        finish_reason: None until the completion has ended.
        text_ended: set by the reader when the last token completed a stop string. Decode ends the completion
            there as well, by the same rule.
    """

    def __init__(
        self, runner: TurnRunner, request: TurnRequest, *, share: PromptShare | None = None, number: int = 0
    ) -> None:
        """Args: share: of the request's choices, if there are several; number: of this choice."""
        self.request = request
        self._share = share
        self._number = number
        self.stats = TurnStats()
        self.finish_reason: FinishReason | None = None
        self.text_ended = False
        self._runner = runner
        self._attempt: Attempt | None = None
        self._admitted = False
        self._was_cut = False
        self._avoid: dict[Role, set[str]] = {"prefill": set(), "decode": set()}
        self._log = structlog.get_logger(__name__).bind(request_id=request.request_id)

    async def run(self) -> TurnStats:
        """Run to the end, for the turn's effects alone.

        Raises: KvferryError; DeadlineExceeded at the request's deadline.
        """
        try:
            async with asyncio.timeout_at(self.request.deadline_s), aclosing(self.events()) as events:
                async for _ in events:
                    pass
        except TimeoutError:
            if self.finish_reason is None:
                raise deadline_passed() from None
        return self.stats

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """Yield Admitted, each token of the completion once, and Finished; then go on until generated KV is
        back at prefill.

        Cancelling the reader, or closing the generator, frees everything that workers have reserved. The
        reader applies the deadline.

        Raises: any KvferryError that ends the turn before Finished; none after it.
        """
        while self.finish_reason is None:
            attempt = await self._begin()
            try:
                async with aclosing(attempt.events()) as events:
                    async for event in events:
                        match event:
                            case SampledToken():
                                if self.text_ended:
                                    # Decode missed the stop string: a replay began in the middle of it.
                                    await attempt.shipped()
                                    break
                                if not self._was_cut and event.index >= len(self.stats.token_ids):
                                    self.stats.token_ids.append(event.token_id)
                                    yield event
                            case Admitted():
                                if self._was_cut:
                                    self._runner.tasks.start(attempt.finish(), name="cut off")
                                if not self._admitted:
                                    self._admitted = True
                                    yield event
                            case Finished(reason=reason):
                                self.finish_reason = reason
                                self._runner.last_success_s = time.monotonic()
                                yield event
            except KvferryError as error:
                if self.finish_reason is not None:
                    self._log.warning("generated KV was not returned to prefill", error=error.message)
                    return
                self._discard(attempt)
                if self._was_cut:
                    raise
                if isinstance(error, HistoryMiss):  # so that the next attempt does not look for it again
                    self.request = replace(self.request, max_reused_tokens=0)
                await self._recover(error, attempt)
            except (asyncio.CancelledError, GeneratorExit):
                self._discard(attempt)
                raise
            if self.finish_reason is None and (ended := self._end_of_tokens()) is not None:
                self._close_share()
                self.finish_reason = ended
                self._runner.last_success_s = time.monotonic()
                yield Finished(reason=ended)

    def cut(self) -> bool:
        """End with the delivered tokens, if the session keeps them and there are any.

        Returns: whether it will; False if the turn is to be given up, or has ended.
        """
        if self.finish_reason is not None or not self.request.keeps_cut_off or not self.stats.token_ids:
            return False
        if not self._was_cut:
            self._was_cut = True
            if self._attempt is not None:
                self._runner.tasks.start(self._attempt.finish(), name="cut off")
        return True

    async def _begin(self) -> Attempt:
        """Begin the next attempt; the first one of a further choice starts from the first choice's prompt."""
        share, stats = self._share, self.stats
        attempt: Attempt | None = None
        if share is not None and self._number:
            self._share = None
            if (first := await asyncio.shield(share)) is not None:
                stats.first, token = first.stats.first, first.sibling_tokens[self._number - 1]
                start = SharedStart(request_id=first.worker_request_id, first_token=token)
                prefill, decode = first.prefill, first.decode
                attempt = Attempt(prefill, decode, self.request, stats, lambda error: None, start=start)
        attempt = self._attempt = attempt or self._next_attempt()
        stats.prefill_address, stats.decode_address = attempt.prefill.address, attempt.decode.address
        stats.worker_request_id = attempt.worker_request_id
        return attempt

    def _next_attempt(self) -> Attempt:
        """Return an attempt at the rest of the turn: delivered tokens join the prompt."""
        request, stats, avoid = self.request, self.stats, self._avoid
        pools, fingerprint = (self._runner.prefill, self._runner.decode), request.model.fingerprint
        version = shared_version(*pools, fingerprint, prefer=request.prefer_prefill)
        if version is None and all(pool.ready_workers(fingerprint) for pool in pools):
            raise WorkerUnavailable(
                "No prefill and decode worker that are ready speak the same block protocol",
                retry_after_s=pools[0].status_interval_s,
            )
        of_turn: dict[str, Any] = {"fingerprint": fingerprint, "version": version}
        prefill = pools[0].choose(**of_turn, prefer=request.prefer_prefill, avoid=avoid["prefill"])
        decode = pools[1].choose(**of_turn, prefer=request.prefer_decode, avoid=avoid["decode"])
        if delivered := tuple(stats.token_ids):
            request = _resumed(request, delivered, stats.first)
            self._close_share()  # the prompt differs now, or is run to draw delivered tokens again
        else:
            stats.first = None  # nothing of an earlier attempt was delivered
        return Attempt(prefill, decode, request, stats, self._other_decode, self._share)

    def _close_share(self) -> None:
        """Let choices that still wait for this one's prompt go on alone."""
        if self._share is not None and not self._share.done():
            self._share.set_result(None)
        self._share = None

    def _other_decode(self, error: KvferryError) -> Worker[DecodeControl] | None:
        """Return a ready decode worker that may take over the running attempt; None if a replay is better."""
        runner, stats, attempt = self._runner, self.stats, self._attempt
        if attempt is None or self._was_cut or not error.retryable or stats.replays >= runner.max_recoveries:
            return None
        _, address = self._give_up("decode", attempt, error)
        of_turn: dict[str, Any] = {
            "fingerprint": self.request.model.fingerprint,
            "version": attempt.prefill.version,
        }
        if not runner.decode.ready_workers(**of_turn):
            return None
        prefer, avoid = self.request.prefer_decode, self._avoid["decode"]
        other = runner.decode.choose(**of_turn, prefer=prefer, avoid=avoid)
        self._count_recovery("decode", address, error)
        stats.decode_address = other.address
        return other

    def _count_recovery(self, role: Role, address: str, error: KvferryError) -> None:
        self.stats.replays += 1
        if not self.request.probe:
            self._runner.metrics.recoveries.labels(role=role).inc()
        self._log.warning(
            "turn resumes on another worker",
            role=role,
            address=address,
            error=error.message,
            num_tokens=len(self.stats.token_ids),
            replay=self.stats.replays,
        )

    def _end_of_tokens(self) -> FinishReason | None:
        """Return why the delivered tokens are a whole completion; None while they are not. Needed if decode
        was lost between its last token and its last event."""
        request, delivered = self.request, self.stats.token_ids
        ends = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            ends |= set(request.model.eos_token_ids)
        if self.text_ended or (delivered and delivered[-1] in ends):
            return "stop"
        return "length" if len(delivered) >= request.sampling.max_tokens else None

    async def _recover(self, error: KvferryError, attempt: Attempt) -> None:
        """Have the next attempt avoid the worker that failed; raise `error` if a replay would not help."""
        stats, runner, role = self.stats, self._runner, attempt.failed_role
        fingerprint = self.request.model.fingerprint
        has_no_room = isinstance(error, Overloaded | CapacityExceeded)
        refused = has_no_room and not isinstance(error, WorkerUnavailable) and not stats.token_ids
        drains = error.reason == REASON and not stats.token_ids
        if role is not None and (refused or drains):
            # The worker lacks room, will end soon, or does not understand the request: not a recovery.
            pool, _ = self._give_up(role, attempt, error)
            others = pool.ready_workers(fingerprint, attempt.prefill.version)
            if any(worker.address not in self._avoid[role] for worker in others):
                return
        final = not error.retryable or isinstance(error, DeadlineExceeded | SessionBusy) or refused
        if final or role is None or stats.replays >= runner.max_recoveries:
            if isinstance(error, LeaseExpired):
                raise Overloaded(
                    "The workers did not have the prompt ready in time; repeat the request later",
                    reason=error.reason,
                    retry_after_s=runner.decode.status_interval_s,
                ) from error
            raise error
        _, address = self._give_up(role, attempt, error)
        pause_s = runner.backoff_s * 2**stats.replays * random.uniform(0.5, 1.5)
        self._count_recovery(role, address, error)
        if self._end_of_tokens() is not None:
            return
        await asyncio.sleep(pause_s)
        await runner.prefill.wait_ready(fingerprint, timeout_s=runner.recovery_wait_s)
        await runner.decode.wait_ready(fingerprint, timeout_s=runner.recovery_wait_s)

    def _give_up(self, role: Role, attempt: Attempt, error: KvferryError) -> tuple[WorkerPool[Any], str]:
        """Avoid the worker that failed the attempt; returns its pool and address."""
        pool: WorkerPool[Any] = getattr(self._runner, role)
        address: str = getattr(attempt, role).address
        self._avoid[role].add(address)
        if isinstance(error, WorkerUnavailable):
            pool.report_lost(address, attempt.instance_ids[role])
        return pool, address

    def _discard(self, attempt: Attempt) -> None:
        """Have prefill drop what the attempt staged, in the background."""
        if self.request.session is None or self.finish_reason is not None:
            return
        abort = attempt.prefill.client.abort_turn(attempt.worker_request_id, timeout_s=_ABORT_TIMEOUT_S)
        self._runner.tasks.start(abort, name="abort turn")


def deadline_passed() -> DeadlineExceeded:
    return DeadlineExceeded("The request's deadline passed before its completion ended")


def _resumed(request: TurnRequest, delivered: tuple[int, ...], first: FirstToken | None) -> TurnRequest:
    """Return the rest of a turn whose first tokens the client has.

    Args: first: prefill's first answer. Another worker selects the same rows only if it runs the same
        tokens, so it reuses no more than the first one did.
    """
    session = request.session
    if session is not None and session.is_implicit:
        session = None  # the prompt was stored with the first token
    if request.plan.is_exact:
        num_left = request.sampling.max_tokens - len(delivered)
        sampling = replace(request.sampling, max_tokens=num_left, first_index=len(delivered))
        prompt = request.prompt_token_ids + delivered
        request = replace(request, question=None)  # the prompt has another end now
    else:
        sampling = replace(request.sampling, delivered=delivered)
        prompt = request.prompt_token_ids
        if first is not None:
            most = request.max_reused_tokens
            reused = first.reused_tokens if most is None else min(most, first.reused_tokens)
            request = replace(request, max_reused_tokens=reused)
    changes: dict[str, Any] = {"session": session, "prompt_logprobs": None, "siblings": ()}
    return replace(request, prompt_token_ids=prompt, sampling=sampling, **changes)
