"""The prefill service: implements `PrefillControl` with the engine, the history store and the block wire.

Place in the request's path: the router calls it, in process or through gRPC. This module runs on the event
loop, prompts run on the engine's thread, and blocks on the wire's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar

import structlog

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.engine import PrefillEngine
from kvferry.services.prefill.job import PrefillJob, Shipped
from kvferry.services.prefill.parts import PrefillRanks
from kvferry.services.prefill.turns import HistoryReceiver
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.kept import MAX_KEPT_BINS
from kvferry.shared.compression.resolve import check_resolved
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    FirstToken,
    HistoryInfo,
    PrefillEvent,
    PrefillRequest,
    PrefixRequest,
    RedirectRequest,
    SessionKey,
    TokenGenerated,
    TransferDone,
    WorkerStatus,
    calling_router,
)
from kvferry.shared.device.kernel_paths import ShownPaths
from kvferry.shared.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    HistoryMiss,
    InvalidRequest,
    KvferryError,
    ProtocolMismatch,
    TransferFailed,
    WorkerUnavailable,
)
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.model.ending import Ending
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.draining import Drain
from kvferry.shared.sampling.grammar import GrammarCompiler
from kvferry.shared.sampling.params import MAX_PROMPT_ALTERNATIVES
from kvferry.shared.telemetry.metrics import PrefillMetrics
from kvferry.shared.telemetry.tracing import stage
from kvferry.shared.wire.messages import PROTOCOL_VERSION
from kvferry.shared.wire.receiver import BlockServer, BlockSink

log = structlog.get_logger(__name__)

T = TypeVar("T")

_MAX_ACKNOWLEDGEMENT_WAITERS = 64
_SWEEP_INTERVAL_S = 1.0
_MAX_REPORTED_LOGPROBS = 1 << 19
"""So that a first token's message stays below the control channel's limit."""


class PrefillService:
    """Implements `PrefillControl`. Owns the engine's thread, the block server, the sender and the store, and
    closes them.

        prefill: validate ──► job ──► engine ──► FirstToken, ... ──► acknowledgement ──► TransferDone
                               └── generator closed, deadline, error: job cancelled at any stage
        staged turn: begun by the engine ──► generated rows from the receiver ──► commit_turn | abort_turn
    """

    def __init__(
        self,
        *,
        model: LanguageModel,
        store: HistoryStore,
        ranks: PrefillRanks,
        server_factory: Callable[[BlockSink], BlockServer],
        metrics: PrefillMetrics,
        config: PrefillConfig,
        clock: Callable[[], float],
        on_device_lost: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Args:
        ranks: with the sender, which is closed with the service.
        server_factory: makes the block server on which decode returns generated KV.
        clock: monotonic seconds.
        on_device_lost: called once if the device no longer works.
        """
        self._model = model
        self._kernel_paths = ShownPaths("prefill", model.device)
        self._methods = applicable_methods(model.spec.layers)
        self._store = store
        self._server_factory = server_factory
        self._metrics = metrics
        self._uncounted = PrefillMetrics()
        """Of the router's probes, which nobody reads."""
        self._config = config
        self._clock = clock
        self._instance_id = secrets.token_hex(8)
        self._tokenizer = cache(lambda: ChatTokenizer.load(config.model))
        spec = model.spec
        self._grammars = GrammarCompiler(self._tokenizer, spec.vocab_size, spec.eos_token_ids)
        self._receiver = HistoryReceiver(spec=model.spec, store=store)
        self._engine = PrefillEngine(
            model=model, store=store, ranks=ranks, receiver=self._receiver, metrics=metrics, config=config,
            clock=clock, on_device_lost=on_device_lost,
        )  # fmt: skip
        self._ranks = ranks
        self._server: BlockServer | None = None
        self._is_wedged = False
        self._drain = Drain(partial(WorkerUnavailable.draining, "prefill"))
        self._jobs: set[PrefillJob] = set()
        self._waiters = ThreadPoolExecutor(_MAX_ACKNOWLEDGEMENT_WAITERS, "kvferry-prefill-acknowledgement")
        self._sweeper: asyncio.Task[None] | None = None
        for tier, size_bytes in store.tier_bytes.items():
            metrics.history_bytes.labels(tier).set_function(size_bytes)

    @property
    def block_endpoint(self) -> str:
        """The endpoint to which decode workers return generated KV; known once started."""
        assert self._server is not None, "the service is not started"
        return self._server.endpoint

    @property
    def is_ready(self) -> bool:
        """True if a layer or a probe has finished recently, the engine is not wedged and no drain has begun.
        Any thread may read this."""
        return self._engine.ready and not self._is_wedged and not self._drain.has_begun

    async def start(self) -> None:
        """Listen for returned history, start the engine and the sweeper of expired staged turns.

        Raises: ConfigurationError: another rank cannot ship.
        """
        connections = self._metrics.block_connections
        await asyncio.to_thread(
            self._ranks.start, self._config, lambda transport: connections.labels(transport).inc()
        )
        self._server = self._server_factory(self._receiver)
        self._engine.start(self._server.endpoint)
        self._sweeper = asyncio.create_task(self._sweep())

    async def drain(self, timeout_s: float) -> None:
        """See `WorkerService.drain`. Waits for staged turns as well, which routers commit after their last
        token; then writes the history that only memory has to the tiers behind it."""
        deadline_s = self._clock() + timeout_s
        if not await self._drain.wait(timeout_s, lambda: len(self._jobs) + len(self._store.turns)):
            for job in tuple(self._jobs):
                error = self._drain.refusal()
                self._cancel(job, error)
                job.fail(error)
        left_s = max(0.0, deadline_s - self._clock())
        if num_left := await asyncio.to_thread(self._store.write_behind, left_s):
            log.warning("history is lost with this worker's memory", num_sessions=num_left)

    async def close(self) -> None:
        """Cancel running jobs and end every thread. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
            self._sweeper = None
        for job in tuple(self._jobs):
            job.cancel(WorkerUnavailable("the prefill worker is shutting down", reason="closed"))
        await self._grammars.close()
        await asyncio.to_thread(self._close_threads)

    def _close_threads(self) -> None:
        self._engine.close()
        if self._server is not None:
            self._server.close()
        self._ranks.sender.close()
        self._store.close()
        self._waiters.shutdown(wait=True)

    async def prefill(
        self, request: PrefillRequest, *, timeout_s: float
    ) -> AsyncGenerator[PrefillEvent, None]:
        """See `PrefillControl.prefill`.

        Raises:
            InvalidRequest, ContextLengthExceeded, ProtocolMismatch: this worker cannot serve the request.
            CapacityExceeded: too many requests are waiting.
            TransferFailed: decode refused the transfer or was lost.
            WorkerUnavailable: the worker is draining or closed.
            DeadlineExceeded, Cancelled.
        """
        self._validate(request)
        deadline_s = self._clock() + timeout_s
        matchers = []
        if (grammar := request.sampling.grammar) is not None:
            await self._grammars.check(grammar, request.owner)
            matcher = partial(self._grammars.matcher, grammar, request.owner)
            matchers = [await asyncio.to_thread(matcher) for _ in (request.sampling, *request.siblings)]
        spec = self._model.spec
        if request.sampling.stop:
            await asyncio.to_thread(self._tokenizer)
        ending = Ending(request.sampling, request.prompt_token_ids, spec, self._tokenizer)
        job = PrefillJob(
            request,
            spec,
            submitted_s=self._clock(),
            deadline_s=deadline_s,
            metrics=self._uncounted if request.probe else self._metrics,
            ending=ending,
            matchers=matchers,
        )
        drawn = _drawn(job)
        finished = False
        try:
            self._engine.submit(job)
            self._jobs.add(job)
            while (event := await self._before(deadline_s, drawn.get(), "prefill")) is not None:
                yield event
            shipped = job.shipped.result()
            with stage("acknowledge"):
                done = await self._acknowledged(job, shipped, deadline_s)
            finished = True
        except Cancelled as error:
            raise job.cause(error) from None
        except TransferFailed as error:
            self._metrics.transfer_failed.labels(error.reason).inc()
            raise
        finally:
            self._jobs.discard(job)
            if not finished:
                self._cancel(job, Cancelled(f"request {request.request_id} was given up"))
        yield done

    async def redirect(self, request: RedirectRequest, *, timeout_s: float) -> None:
        job = next((job for job in self._jobs if job.request.request_id == request.request_id), None)
        if job is None:
            raise TransferFailed(f"request {request.request_id!r} is not running here", reason="resend")
        await self._in_thread(lambda: job.redirect(request.ticket), timeout_s)
        self._engine.turns.expect(job)

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo:
        """See `PrefillControl.commit_turn`.

        Raises:
            HistoryMiss: the request has no staged turn: never begun, ended, expired, or lost in a restart.
            SessionNotFound, SessionBusy, InvalidRequest: as `StagedTurn.commit`.
        """
        turn = self._store.turn(request.request_id)
        if turn is None:
            raise HistoryMiss(f"request {request.request_id!r} has no staged turn", reason="unknown_turn")
        if turn.session != request.session:
            raise InvalidRequest(f"request {request.request_id!r} staged a turn of another session")
        self._receiver.forget(request.request_id)
        begin_s = self._clock()
        info = await self._in_thread(lambda: turn.commit(request.token_ids, pinned=request.pin), timeout_s)
        self._metrics.history_store.labels(self._model.spec.name).observe(self._clock() - begin_s)
        return info

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        self._receiver.forget(request_id)
        turn = self._store.turn(request_id)
        if turn is not None:
            await self._in_thread(turn.abort, timeout_s)

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        """See `PrefillControl.session_info`; tier "none" if nothing is stored."""
        return await self._in_thread(lambda: self._store.info(session), timeout_s)

    async def prefix_info(self, request: PrefixRequest, *, timeout_s: float) -> HistoryInfo:
        return HistoryInfo(
            num_tokens=self._store.num_shared(request.owner, request.block_hashes), size_bytes=0
        )

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        self._engine.turns.shipped.drop(session)
        return await self._in_thread(lambda: self._store.drop(session), timeout_s)

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        """See `PrefillControl.status`. A router that asks is alive, and will commit its staged turns."""
        self._store.extend_leases(calling_router.get())
        waiting = self._engine.num_waiting
        return WorkerStatus(
            role="prefill",
            instance_id=self._instance_id,
            protocol_version=PROTOCOL_VERSION,
            ready=self.is_ready,
            draining=self._drain.has_begun,
            running=max(0, len(self._jobs) - waiting),
            waiting=waiting,
            free_bytes=max(0, self._store.max_bytes - self._store.size_bytes),
            total_bytes=self._store.max_bytes,
            model=self._model.spec,
            methods=self._methods,
            kernel_paths=self._kernel_paths.by_op,
        )

    def _validate(self, request: PrefillRequest) -> None:
        if self._drain.has_begun:
            raise self._drain.refusal()
        spec, prompt = self._model.spec, request.prompt_token_ids
        if request.model_fingerprint != spec.fingerprint:
            raise ProtocolMismatch(
                f"the request is for model {request.model_fingerprint}; this worker has {spec.fingerprint}",
                reason="model_fingerprint",
            )
        num_ranks, num_at_decode = self._model.num_ranks, 1 + len(request.ticket.part_endpoints)
        if num_at_decode % num_ranks:
            raise ProtocolMismatch(
                f"the decode worker has {num_at_decode} ranks; it must have a multiple of the {num_ranks} of "
                "this prefill worker",
                reason="ranks",
            )
        if not prompt:
            raise InvalidRequest("the prompt has 0 tokens; it must have at least 1", param="prompt")
        max_tokens = request.sampling.max_tokens
        if max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {max_tokens}; it must be at least 1", param="max_tokens")
        if not 0 <= request.retained_bins <= MAX_KEPT_BINS:
            raise InvalidRequest(
                f"retained_bins is {request.retained_bins}; it must be 0 to {MAX_KEPT_BINS}",
                param="kv_kept_bins",
            )
        if request.prompt_logprobs is not None:
            self._validate_logprobs(request, request.prompt_logprobs)
        if len(prompt) + max_tokens > spec.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}; together at most "
                f"{spec.max_model_len} fit",
                param="prompt" if len(prompt) >= spec.max_model_len else "max_tokens",
            )

        if request.ticket.plan is None:
            raise InvalidRequest("the ticket has no plan; decode sends one with each", param="ticket.plan")
        check_resolved(
            request.ticket.plan,
            num_prompt_tokens=len(prompt),
            max_new_tokens=max_tokens,
            num_layers=spec.num_layers,
        )

    def _validate_logprobs(self, request: PrefillRequest, count: int) -> None:
        problem = ""
        if not 0 <= count <= MAX_PROMPT_ALTERNATIVES:
            problem = f"it must be 0 to {MAX_PROMPT_ALTERNATIVES}"
        elif (number := (count + 1) * len(request.prompt_token_ids)) > _MAX_REPORTED_LOGPROBS:
            problem = (
                f"with this prompt that is {number} values; at most {_MAX_REPORTED_LOGPROBS} are reported"
            )
        elif request.session is not None or request.document is not None:
            problem = "the request must have no session and no document, because every token is run"
        if problem:
            raise InvalidRequest(f"prompt_logprobs is {count}; {problem}", param="prompt_logprobs")

    async def _acknowledged(self, job: PrefillJob, shipped: Shipped, deadline_s: float) -> TransferDone:
        """Wait for decode's acknowledgement and record the transfer's metrics."""
        transfer = job.transfer
        assert transfer is not None
        # Longer than the deadline, so that the error names the deadline.
        wait_s = max(0.0, deadline_s - self._clock()) + 1.0
        waiting = asyncio.get_running_loop().run_in_executor(self._waiters, transfer.wait, wait_s)
        transfer_s = await self._before(deadline_s, waiting, "the transfer")
        sent, metrics, by = transfer.bytes_by_kind, job.metrics, (self._model.spec.name, shipped.method)
        for kind, size_bytes in sent.items():
            metrics.kv_transfer_bytes.labels(*by, kind).inc(size_bytes)
        metrics.kv_resent_bytes.labels(*by).inc(transfer.resent_bytes)
        metrics.kv_full_bytes.labels(*by).inc(shipped.full_bytes)
        metrics.kv_compression_ratio.labels(*by).observe(shipped.full_bytes / sum(sent.values()))
        metrics.transfer.labels(*by).observe(transfer_s)
        if job.retained is not None:
            metrics.kv_delta_saved_bytes.labels(*by).inc(transfer.rows.saved_bytes)
        delta_bytes = sent["rows"] if job.retained is not None else None
        return TransferDone(
            bytes_by_kind=sent,
            transfer_s=transfer_s,
            delta_bytes=delta_bytes,
            prefill_s=shipped.prefill_s,
            compress_s=shipped.compress_s,
            retained_fractions=shipped.retained_fractions,
        )

    async def _before(self, deadline_s: float, work: Awaitable[T], what: str) -> T:
        try:
            # `wait_for` of Python 3.11 loses a cancellation that comes as the work ends.
            async with asyncio.timeout(max(0.0, deadline_s - self._clock())):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(f"{what} did not finish by the request's deadline") from None

    async def _in_thread(self, work: Callable[[], T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise DeadlineExceeded(f"the history store did not answer within {timeout_s} s") from None

    def _cancel(self, job: PrefillJob, error: KvferryError) -> None:
        self._engine.withdraw(job)
        self._receiver.forget(job.request.request_id, job.key)
        job.cancel(error)

    async def _sweep(self) -> None:
        """Drop expired staged turns periodically, and give up the requests of a wedged engine."""
        while True:
            await asyncio.sleep(min(_SWEEP_INTERVAL_S, self._config.turn_lease_s / 10))
            self._give_up_if_wedged()
            expired = self._store.sweep()
            if expired:
                log.warning("staged turns expired", count=expired)
            self._receiver.prune()

    def _give_up_if_wedged(self) -> None:
        is_wedged = self._engine.is_wedged
        if is_wedged != self._is_wedged:
            log.error("the prefill engine is wedged" if is_wedged else "the prefill engine works again")
        self._is_wedged = is_wedged
        for job in tuple(self._jobs) if is_wedged else ():
            message = "the prefill engine makes no progress; its requests are given up"
            error = WorkerUnavailable(message, reason="wedged")
            self._cancel(job, error)
            job.fail(error)


def _drawn(job: PrefillJob) -> asyncio.Queue[FirstToken | TokenGenerated | None]:
    """Return a queue of the tokens that a job draws, as they come, then None."""
    queue, loop = asyncio.Queue[FirstToken | TokenGenerated | None](), asyncio.get_running_loop()

    def put(event: FirstToken | TokenGenerated | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            loop.call_soon_threadsafe(queue.put_nowait, event)

    job.tell = put
    job.shipped.add_done_callback(lambda _: put(None))
    return queue
