"""The decode worker: implements `DecodeControl` over scheduler, receiver, engine and history return.

    generate ── reserve (scheduler) ── ticket ── blocks (receiver) ── tokens (engine) ── rows (history return)

Streams run on the event loop and work runs in threads; they share a `Sequence` and its `EventStream`. The
block server's factory and the sender are passed in, so this module does not depend on a transport.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

import structlog

from kvferry.services.decode.config import DecodeConfig, arena_size_bytes
from kvferry.services.decode.engine import DecodeEngine
from kvferry.services.decode.events import EventStream
from kvferry.services.decode.finished import HistoryReturner, RetainedSelections
from kvferry.services.decode.memory import Scheduler, SequenceMemory
from kvferry.services.decode.parts import Parts
from kvferry.services.decode.receiver import Expected
from kvferry.services.decode.sequence import Reservations, Sequence
from kvferry.services.decode.shared_prompts import SharedPrompt, SharedPrompts
from kvferry.services.decode.warm_up import decode_warm_up
from kvferry.shared.cache.arena import ByteArena, measured_limit_bytes
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, num_draft_tokens
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.control.messages import (
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryInfo,
    HistoryReturned,
    SessionKey,
    Ticket,
    TicketIssued,
    WorkerStatus,
    calling_router,
)
from kvferry.shared.device.kernel_paths import ShownPaths
from kvferry.shared.errors import (
    CapacityExceeded,
    ContextLengthExceeded,
    InvalidRequest,
    ProtocolMismatch,
    WorkerUnavailable,
)
from kvferry.shared.model.ending import Ending
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.draining import Drain
from kvferry.shared.process.worker import RankTransport
from kvferry.shared.sampling.grammar import GrammarCompiler
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.shared.telemetry.metrics import DecodeMetrics
from kvferry.shared.telemetry.tracing import stage
from kvferry.shared.wire.messages import PROTOCOL_VERSION, TransferKey
from kvferry.shared.wire.receiver import BlockServer, BlockSink
from kvferry.shared.wire.sender import BlockSender

_log = structlog.get_logger(__name__)
_CLOSE_TIMEOUT_S = 10.0


class DecodeService:
    """Implements `DecodeControl` between `start` and `close`.

    Closing a stream frees its arena bytes: at once before and during the transfer and while generated KV is
    returned, otherwise at the end of the running step.

    Args:
        model: loaded; after `start`, only the engine's thread uses it.
        server_factory: makes the block server when the service starts.
        sender: returns generated KV to prefill; closed with the service.
        on_device_lost: see `DecodeEngine`.
        sweep_interval_s: interval between checks for expired leases.
        rank_transport: with which other ranks take the blocks of their heads; None with one rank.
    """

    def __init__(
        self,
        config: DecodeConfig,
        *,
        model: LanguageModel,
        tokenizer: ChatTokenizer,
        metrics: DecodeMetrics,
        server_factory: Callable[[BlockSink], BlockServer],
        sender: BlockSender,
        clock: Callable[[], float] = time.monotonic,
        sweep_interval_s: float = 0.25,
        on_device_lost: Callable[[Exception], None] = lambda error: None,
        rank_transport: RankTransport | None = None,
    ) -> None:
        self._config = config
        self._rank_transport = rank_transport
        self._clock = clock
        self._spec = model.spec
        self._kernel_paths = ShownPaths("decode", model.device)
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(lambda: tokenizer, model.spec.vocab_size, model.spec.eos_token_ids)
        self._metrics, self._probe_metrics = metrics, DecodeMetrics()
        self._instance_id = secrets.token_hex(8)
        self._closed = False
        self._drain = Drain(partial(WorkerUnavailable.draining, "decode"))
        self._is_wedged = False
        size_bytes = arena_size_bytes(config, model.device, num_ranks=model.num_ranks)
        self.arena = ByteArena(size_bytes, model.device)
        self._parts = Parts(model, self.arena.memory)
        self._methods = self._parts.methods(applicable_methods(model.spec.layers))
        self._retained = RetainedSelections(
            self._parts,
            self.arena,
            retain_s=config.retain_s,
            clock=clock,
            release=lambda allocation: self._scheduler.release(allocation),
        )
        self._scheduler = Scheduler(
            self.arena,
            max_waiting=config.max_waiting,
            admission_wait_s=config.admission_wait_s,
            evict=self._retained.evict,
        )
        self._memory = SequenceMemory(
            self._parts,
            self.arena,
            self._scheduler,
            on_swapped_out=metrics.preempted.labels(self._spec.name).inc,
        )
        self._returner = HistoryReturner(self._spec, self._parts, sender, self._retained, config)
        self._engine = DecodeEngine(
            model,
            metrics,
            config,
            clock=clock,
            parts=self._parts,
            memory=self._memory,
            on_finished=self._returner.submit,
            warm_up=decode_warm_up(config, model, self.arena, metrics.warm_up),
            on_device_lost=on_device_lost,
        )
        self._sweep_interval_s = sweep_interval_s
        self._stop_sweeping = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="kvferry-lease-sweeper", daemon=True)
        self._prompts = SharedPrompts(self._parts, lease_s=config.lease_s, clock=clock)
        self._reservations = Reservations(
            self._parts,
            self.arena,
            metrics,
            share=self._prompts.put,
            clock=clock,
            submit=self._engine.submit,
        )
        self._parts.listen(self._reservations)
        self._server_factory = server_factory
        self._server: BlockServer | None = None
        metrics.waiting.set_function(lambda: self._scheduler.num_waiting)

    @property
    def block_endpoint(self) -> str:
        """The endpoint where blocks arrive; known once started."""
        assert self._server is not None, "the service is not started"
        return self._server.endpoint

    @property
    def is_ready(self) -> bool:
        """True if the engine is healthy and the service takes turns. Any thread may read this."""
        has_ended = self._closed or self._drain.has_begun or self._is_wedged
        return not has_ended and self._engine.healthy(self._config.heartbeat_timeout_s)

    async def start(self) -> None:
        """Listen for blocks, start the engine and the lease sweeper."""
        await asyncio.to_thread(self._parts.start, self._rank_transport, self._config.max_batch_size)
        self._server = self._server_factory(self._parts.own.receiver)
        self._engine.start()
        self._sweeper.start()

    async def drain(self, timeout_s: float) -> None:
        """See `WorkerService.drain`. Requests that wait for memory are refused at once."""
        self._scheduler.refuse_waiting(self._drain.refusal)
        if not await self._drain.wait(timeout_s, lambda: len(self._reservations.all())):
            for sequence in self._reservations.all():
                sequence.events.put(self._drain.refusal())

    async def close(self) -> None:
        """Fail all requests, free all memory and end the threads. Idempotent."""
        self._closed = True
        await self._grammars.close()
        await asyncio.to_thread(self._close_threads)

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        """See `DecodeControl.generate`.

        Raises:
            InvalidRequest: this worker can never serve the tokens, the plan or the size.
            ProtocolMismatch: the request is for another model, or a transfer for another plan arrived.
            CapacityExceeded: no memory became free in time, or too many requests wait for it.
            LeaseExpired, TransferFailed: the prompt's KV did not arrive, or is not there to share.
            DeadlineExceeded: timeout_s has passed.
            WorkerUnavailable: the worker is draining or closed.
            KvferryError: decoding failed.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._check(request)
        shared = self._prompts.take(request, request.shares) if request.shares is not None else None
        sequence = await self._admit(request, timeout_s, shared)
        chain = sequence.pinned.chain if sequence.pinned is not None else None
        try:
            if shared is not None and request.shares is not None:
                copy = partial(self._prompts.copy, shared, sequence)
                await asyncio.to_thread(self._reservations.copied, sequence, copy, request.shares.first_token)
            yield TicketIssued(
                ticket=Ticket(
                    endpoint=self.block_endpoint,
                    transfer_id=sequence.key.transfer_id,
                    generation=sequence.key.generation,
                    credit_bytes=self._config.credit_bytes,
                    lease_s=min(self._config.lease_s, timeout_s),
                    reserved_bytes=sequence.allocation.size_bytes * self._parts.num_ranks,
                    plan=sequence.resolved,
                    retained_transfer_id=chain.transfer_id if chain is not None else 0,
                    retained_tokens=chain.num_tokens if chain is not None else 0,
                    retained_depth=chain.depth if chain is not None else 0,
                    part_endpoints=self._parts.endpoints,
                )
            )
            last = HistoryReturned if request.store_history else GenerationFinished
            while True:
                event = await sequence.events.get(deadline_s=deadline_s)
                yield event
                if isinstance(event, last):
                    return
        except BaseException:
            self._prompts.forget(request.request_id)
            raise
        finally:
            sequence.cancel()
            self._engine.wake()

    async def finish(self, request_id: str, *, timeout_s: float) -> None:
        """See `DecodeControl.finish`. If its KV has not arrived, a completion ends with its first token."""
        for sequence in self._reservations.all():
            if sequence.request.request_id == request_id:
                sequence.cut_off = True
        self._engine.wake()

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        """See `DecodeControl.drop_session`; tier "retained"."""
        return HistoryInfo(num_tokens=0, size_bytes=self._retained.drop(session), tier="retained")

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        """See `DecodeControl.status`. A router that asks is alive, which renews its reservations."""
        self._reservations.renew(calling_router.get(), self._clock() + self._config.lease_s)
        running = self._engine.num_running
        return WorkerStatus(
            role="decode",
            instance_id=self._instance_id,
            protocol_version=PROTOCOL_VERSION,
            ready=self.is_ready,
            draining=self._drain.has_begun,
            running=running,
            waiting=max(len(self._reservations.all()) - running, 0) + self._scheduler.num_waiting,
            free_bytes=(self.arena.free_bytes + self._retained.spare_bytes) * self._parts.num_ranks,
            total_bytes=self.arena.size_bytes * self._parts.num_ranks,
            model=self._spec,
            methods=self._methods,
            kernel_paths=self._kernel_paths.by_op,
        )

    async def _admit(
        self, request: GenerateRequest, timeout_s: float, shared: SharedPrompt | None
    ) -> Sequence:
        """Reserve memory. Everything that can fail runs before the bytes are reserved."""
        metrics, lengths = self._metrics, self._memory.lengths
        if request.probe:  # a readiness turn is counted in metrics that are not shown
            metrics, lengths = self._probe_metrics, deque(maxlen=1)
        sampling, stores = request.sampling, request.store_history
        room = self._memory.first_room(sampling.max_tokens)
        if shared is not None:
            room = max(room, shared.room)
            plans, laid_out = [shared.resolved], [shared.plan]
        else:
            plans = laid_out = self._resolved(request)
            room = max(room, min(num_draft_tokens(plans[0]) + 2, sampling.max_tokens))
            if room < sampling.max_tokens:
                plans = laid_out = [
                    self._memory.within_arena(resolved, returns_generated=stores) for resolved in plans
                ]
                room = min(room, *(plan.max_new_tokens for plan in plans))
        layouts = [self._memory.layout(plan, room, returns_generated=stores) for plan in laid_out]
        self._parts.check(layouts[0], request.plan.method)
        sizes_bytes = [
            measured_limit_bytes(layout) if shared is None and is_measured(plan) else layout.size_bytes
            for plan, layout in zip(plans, layouts, strict=True)
        ]
        matcher = None
        if (grammar := sampling.grammar) is not None:
            await self._grammars.check(grammar, request.owner)
            matcher = await asyncio.to_thread(self._grammars.matcher, grammar, request.owner)
        sampler = SequenceSampler(
            sampling,
            request.prompt_token_ids,
            self._spec.vocab_size,
            eos_token_ids=self._spec.eos_token_ids,
            matcher=matcher,
        )
        ending = Ending(sampling, request.prompt_token_ids, self._spec, lambda: self._tokenizer)
        self._retained.touch(request.session)
        try:
            with stage("admit"):
                allocation = await self._scheduler.reserve(
                    sizes_bytes[0],
                    owner=request.request_id,
                    key_owner=request.owner,
                    timeout_s=timeout_s,
                    smaller=tuple(sizes_bytes[1:]),
                )
        except (CapacityExceeded, InvalidRequest) as error:
            metrics.admission_rejected.labels(error.reason).inc()
            raise
        chosen = next(i for i, size in enumerate(sizes_bytes) if size <= allocation.size_bytes)
        layout = layouts[chosen]
        key = TransferKey(transfer_id=secrets.randbits(64), generation=allocation.generation)
        pinned = None
        if shared is None and all(layer.format.is_plain for layer in layout.layers):  # others are not reused
            pinned = self._retained.pin(request.session, request.prompt_token_ids)
        selections = () if pinned is None else pinned.chain.selections
        expected = Expected(
            resolved=plans[chosen],
            room=room,
            returns_generated=stores,
            retained=tuple((selection.transfer_id, selection.num_tokens) for selection in selections),
        )
        sequence = Sequence(
            request=request,
            resolved=plans[chosen],
            part=self._parts.call("begin", key, allocation, layout, expected if shared is None else None),
            room=room,
            key=key,
            pinned=pinned,
            allocation=allocation,
            router=calling_router.get(),
            lease_until_s=self._clock() + min(self._config.lease_s, timeout_s),
            events=EventStream(),
            sampler=sampler,
            ending=ending,
            release=self._scheduler.release,
            forget=self._reservations.remove,
            metrics=metrics,
            lengths=lengths,
        )
        self._reservations.add(sequence)
        return sequence

    def _resolved(self, request: GenerateRequest) -> list[ResolvedPlan]:
        """Return the plan as requested, then with smaller budgets if this worker may use them."""
        smaller = request.plan.budget.smaller() if self._config.elastic_budget else ()
        return [
            resolve_plan(
                plan,
                num_prompt_tokens=len(request.prompt_token_ids),
                max_new_tokens=request.sampling.max_tokens,
                num_layers=self._spec.num_layers,
                head_dim=self._spec.head_dim,
                layers=self._spec.layers,
            )
            for plan in (request.plan, *(replace(request.plan, budget=budget) for budget in smaller))
        ]

    def _check(self, request: GenerateRequest) -> None:
        if self._closed or self._server is None:
            raise WorkerUnavailable("the decode worker is not running", reason="closed")
        if self._drain.has_begun:
            raise self._drain.refusal()
        if request.model_fingerprint != self._spec.fingerprint:
            raise ProtocolMismatch(
                f"the request is for model {request.model_fingerprint!r}; this worker has "
                f"{self._spec.fingerprint!r} ({self._spec.name})",
                reason="model_fingerprint",
            )
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        first_index = request.sampling.first_index
        if num_prompt + max_tokens > self._spec.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}; together they may be "
                f"{self._spec.max_model_len} at most",
                param="max_tokens",
            )
        if not 0 <= first_index < max(num_prompt, 1):
            raise InvalidRequest(f"first_index is {first_index}; it must be 0 to {num_prompt - 1}")

    def _close_threads(self) -> None:
        self._engine.close()
        if self._server is not None:
            self._server.close()
        for sequence in self._reservations.all():
            sequence.cancel()
            sequence.events.put(WorkerUnavailable("the decode worker is shutting down", reason="closed"))
        self._returner.close()
        self._stop_sweeping.set()
        self._retained.has_grown.set()
        if self._sweeper.ident is not None:
            self._sweeper.join(_CLOSE_TIMEOUT_S)
        self._prompts.close()
        self._retained.close()

    def _sweep(self) -> None:
        """Free the memory of leases that have ended and of rows that are retained twice, and give up the
        requests of a wedged engine. It has its own thread, so this works even if the event loop or the engine
        is stuck."""
        while not self._stop_sweeping.is_set():
            self._retained.has_grown.wait(self._sweep_interval_s)
            self._retained.has_grown.clear()
            try:
                self._retained.expire()
                self._retained.shrink()
                if self._prompts.entries:
                    self._prompts.expire()
                self._reservations.expire()
                self._give_up_if_wedged()
                if not self._reservations.all():
                    self.arena.check_integrity()
            except Exception:
                _log.exception("sweep failed")

    def _give_up_if_wedged(self) -> None:
        """End the streams of a wedged engine, so that other workers can go on with them. The engine frees
        their memory if it ever continues."""
        is_wedged = self._engine.is_wedged
        if is_wedged != self._is_wedged:
            _log.error("the decode engine is wedged" if is_wedged else "the decode engine works again")
        self._is_wedged = is_wedged
        for sequence in self._reservations.all() if is_wedged else ():
            if not sequence.cancelled:
                message = "the decode engine makes no progress; its requests are given up"
                sequence.events.put(WorkerUnavailable(message, reason="wedged"))
