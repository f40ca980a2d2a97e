"""One turn: a prompt's tokens in, the completion's tokens out, each exactly once, whichever workers are lost.

A turn is an async generator. Where a worker is lost it replays the prompt and the tokens already delivered on
another one: as one prompt where that gives the same KV; otherwise decode draws the delivered tokens again, so
that a lossy method says what it would have said. It handles tokens only; `completion.py` makes text of them
and updates the session.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import structlog
import xxhash

from kvferry.services.router.turn.attempt import (
    Admitted,
    Attempt,
    Finished,
    PromptShare,
    SiblingAttempt,
    TurnEvent,
    TurnRequest,
    TurnStats,
)
from kvferry.services.router.turn.worker_pool import Role, Worker, WorkerPool, served_model, shared_version
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    DecodeControl,
    FinishReason,
    FirstToken,
    HistoryInfo,
    PrefillControl,
    PrefixRequest,
    SessionKey,
)
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
from kvferry.shared.history.records import block_hashes
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.draining import REASON
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry.metrics import RouterMetrics

_ABORT_TIMEOUT_S = 2.0
_COMMIT_TIMEOUT_S = 10.0
_DROP_TIMEOUT_S = 2.0
_PREFIX_TIMEOUT_S = 0.5

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
    """Dependencies and retry policy of turns.

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

    async def run(self, request: TurnRequest) -> TurnStats:
        """Run a turn to its end, for its effects alone.

        Raises: KvferryError; DeadlineExceeded at the request's deadline.
        """
        turn = Turn(self, request)
        try:
            async with asyncio.timeout_at(request.deadline_s), aclosing(turn.events()) as events:
                async for _ in events:
                    pass
        except TimeoutError:
            if turn.finish_reason is None:
                raise deadline_passed() from None
        return turn.stats

    def model(self) -> ModelSpec:
        """The model that the workers serve now.

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
        """Make what the turn staged the session's history, or drop it where the session's lease is no longer
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
        """The prefill workers that have a prefix of the prompt stored for the owner, the longest one first;
        where none has, `prefer`, or the least loaded of those that were asked if there are others.

        They are asked, because other routers' prompts are stored there as well. One that does not answer
        soon has none. A worker that is alone is not asked. Of many workers, the few near the prompt's first
        block are asked, and prompts go to them: what a request costs does not grow with the workers.
        """
        num_ready = len(self.prefill.ready_workers(fingerprint))
        hashes = tuple(block_hashes(prompt, len(prompt)))
        if num_ready == 1 or not hashes:
            return prefer
        place = xxhash.xxh3_64_intdigest(f"{owner} {hashes[0]}".encode())
        workers = self.prefill.near(place, fingerprint=fingerprint)
        request = PrefixRequest(owner=owner, block_hashes=hashes)
        calls = (worker.client.prefix_info(request, timeout_s=_PREFIX_TIMEOUT_S) for worker in workers)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        stored = {
            worker.address: answer.num_tokens
            for worker, answer in zip(workers, answers, strict=True)
            if isinstance(answer, HistoryInfo) and answer.num_tokens
        }
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
        clients = [worker.client for worker in workers]
        calls = (client.drop_session(session, timeout_s=_DROP_TIMEOUT_S) for client in clients)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, KvferryError):
                _logger.warning("history not dropped", error=result.message)
            elif isinstance(result, BaseException):
                raise result


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
        self._log = _logger.bind(request_id=request.request_id)

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """Admitted, each token of the completion once, and Finished; then goes on until generated KV is back
        at prefill.

        Cancelling the reader, or closing the generator, frees everything that workers have reserved. The
        reader applies the deadline.

        Raises: any KvferryError that ends the turn before Finished; none after it.
        """
        while self.finish_reason is None:
            attempt = await self._sibling_attempt() or self._next_attempt()
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
                if isinstance(error, HistoryMiss):  # it would be looked for again
                    self.request = replace(self.request, max_reused_tokens=0)
                if not self._tries_elsewhere(error, attempt):
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

        Returns: whether it will; False where the turn is to be given up, or has ended.
        """
        if self.finish_reason is not None or not self.request.keeps_cut_off or not self.stats.token_ids:
            return False
        if not self._was_cut:
            self._was_cut = True
            if self._attempt is not None:
                self._runner.tasks.start(self._attempt.finish(), name="cut off")
        return True

    async def _sibling_attempt(self) -> Attempt | None:
        """An attempt from the prompt of the first choice; None if this is the first, or has tried that."""
        share = self._share
        if share is None or self._number == 0:
            return None
        self._share = None
        if (first := await share.attempt()) is None:
            return None
        self._attempt = attempt = SiblingAttempt(first, self._number - 1, self.request, self.stats)
        self._note(attempt)
        return attempt

    def _next_attempt(self) -> Attempt:
        """An attempt at the rest of the turn: delivered tokens join the prompt."""
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
            self._close_share()  # the prompt is another one now, or it is run to draw delivered tokens again
        else:
            stats.first = None  # nothing of an earlier attempt was delivered
        self._attempt = attempt = Attempt(prefill, decode, request, stats, self._other_decode, self._share)
        self._note(attempt)
        return attempt

    def _close_share(self) -> None:
        """Let choices that still wait for this one's prompt go on alone."""
        if self._share is not None:
            self._share.accept(None)
            self._share = None

    def _note(self, attempt: Attempt) -> None:
        stats = self.stats
        stats.prefill_address, stats.decode_address = attempt.prefill.address, attempt.decode.address
        stats.worker_request_id = attempt.worker_request_id

    def _other_decode(self, error: KvferryError) -> Worker[DecodeControl] | None:
        """A ready decode worker that may take over the running attempt; None where a replay is better."""
        runner, stats, attempt = self._runner, self.stats, self._attempt
        if attempt is None or self._was_cut or not error.retryable or stats.replays >= runner.max_recoveries:
            return None
        fingerprint, address = self.request.model.fingerprint, attempt.decode.address
        self._avoid["decode"].add(address)
        if isinstance(error, WorkerUnavailable):
            runner.decode.report_lost(address, attempt.instance_ids["decode"])
        version = attempt.prefill.version
        if not runner.decode.ready_workers(fingerprint, version):
            return None
        other = runner.decode.choose(
            fingerprint=fingerprint,
            version=version,
            prefer=self.request.prefer_decode,
            avoid=self._avoid["decode"],
        )
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
        """Why the delivered tokens are a whole completion; None while they are not. Needed where decode was
        lost between its last token and its last event."""
        request, delivered = self.request, self.stats.token_ids
        ends = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            ends |= set(request.model.eos_token_ids)
        if self.text_ended or (delivered and delivered[-1] in ends):
            return "stop"
        return "length" if len(delivered) >= request.sampling.max_tokens else None

    def _tries_elsewhere(self, error: KvferryError, attempt: Attempt) -> bool:
        """Whether another worker may run the turn that this one has refused: it lacks room, is to end, or
        does not know what it is to do. This is not a recovery."""
        drains = error.reason == REASON
        if not (_is_refusal(error) or drains) or self.stats.token_ids or attempt.failed_role is None:
            return False
        pool, address = self._failed(attempt)
        if drains:
            pool.report_lost(address, attempt.instance_ids[attempt.failed_role])
        avoid = self._avoid[attempt.failed_role]
        avoid.add(address)
        others = pool.ready_workers(self.request.model.fingerprint, attempt.prefill.version)
        return any(worker.address not in avoid for worker in others)

    async def _recover(self, error: KvferryError, attempt: Attempt) -> None:
        """Pause and wait for workers, or raise `error` where a replay would not help."""
        stats, runner, role = self.stats, self._runner, attempt.failed_role
        refused = _is_refusal(error) and not stats.token_ids
        final = not error.retryable or isinstance(error, DeadlineExceeded | SessionBusy) or refused
        if final or role is None or stats.replays >= runner.max_recoveries:
            if isinstance(error, LeaseExpired):
                raise Overloaded(
                    "The workers did not have the prompt ready in time; repeat the request later",
                    reason=error.reason,
                    retry_after_s=runner.decode.status_interval_s,
                ) from error
            raise error
        pool, address = self._failed(attempt)
        self._avoid[role].add(address)
        if isinstance(error, WorkerUnavailable):
            pool.report_lost(address, attempt.instance_ids[role])
        pause_s = runner.backoff_s * 2**stats.replays * random.uniform(0.5, 1.5)
        self._count_recovery(role, address, error)
        if self._end_of_tokens() is not None:
            return
        await asyncio.sleep(pause_s)
        fingerprint = self.request.model.fingerprint
        await runner.prefill.wait_ready(fingerprint, timeout_s=runner.recovery_wait_s)
        await runner.decode.wait_ready(fingerprint, timeout_s=runner.recovery_wait_s)

    def _failed(self, attempt: Attempt) -> tuple[WorkerPool[PrefillControl] | WorkerPool[DecodeControl], str]:
        if attempt.failed_role == "prefill":
            return self._runner.prefill, attempt.prefill.address
        return self._runner.decode, attempt.decode.address

    def _discard(self, attempt: Attempt) -> None:
        """Have prefill drop what the attempt staged, in the background."""
        if self.request.session is None or self.finish_reason is not None:
            return
        abort = attempt.prefill.client.abort_turn(attempt.worker_request_id, timeout_s=_ABORT_TIMEOUT_S)
        self._runner.tasks.start(abort, name="abort turn")


def deadline_passed() -> DeadlineExceeded:
    return DeadlineExceeded("The request's deadline passed before its completion ended")


def _resumed(request: TurnRequest, delivered: tuple[int, ...], first: FirstToken | None) -> TurnRequest:
    """The rest of a turn whose first tokens the client has.

    Args: first: prefill's first answer. Another worker selects the same rows only where it runs the same
        tokens, so it reuses no more than the first one did.
    """
    session = request.session
    if session is not None and session.is_implicit:
        session = None  # the prompt was stored with the first token
    if request.plan.is_exact:
        num_left = request.sampling.max_tokens - len(delivered)
        sampling = replace(request.sampling, max_tokens=num_left, first_index=len(delivered))
        prompt = request.prompt_token_ids + delivered
    else:
        sampling = replace(request.sampling, delivered=delivered)
        prompt = request.prompt_token_ids
        if first is not None:
            most = request.max_reused_tokens
            reused = first.reused_tokens if most is None else min(most, first.reused_tokens)
            request = replace(request, max_reused_tokens=reused)
    return replace(request, prompt_token_ids=prompt, sampling=sampling, session=session, prompt_logprobs=None)


def _is_refusal(error: KvferryError) -> bool:
    """The worker works and has no room now, or is of another release; the client may retry."""
    return isinstance(error, Overloaded | CapacityExceeded) and not isinstance(error, WorkerUnavailable)
