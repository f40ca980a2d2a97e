"""The decode engine: continuous batching in one thread.

Takes complete sequences from the receiver, runs them together step by step, and puts each token into its
request's stream. Finished sequences go to the history return. Sequences of any length and method share a
batch, and no result depends on the other sequences. If steps are captured (`step.py`), the next one runs
while this thread handles the last one's tokens: stop strings, delivery, admission.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import structlog
import torch
from torch import Tensor

from kvferry.kernels.quarantine import is_lost
from kvferry.services.decode.cuda_device import step_device
from kvferry.services.decode.lanes import LaunchedSteps, StepLanes
from kvferry.services.decode.memory import SequenceMemory
from kvferry.services.decode.parts import Parts
from kvferry.services.decode.sequence import EventStream, Sequence, SequenceState, deliver
from kvferry.services.decode.shadow import ShadowStep
from kvferry.services.decode.step import (
    EAGER_STEPS,
    LaunchedStep,
    StepDevice,
    StepInput,
    StepRunner,
)
from kvferry.shared.cache.arena import Allocation
from kvferry.shared.control.messages import (
    FinishReason,
    GenerateEvent,
    GenerationFinished,
    TokenGenerated,
)
from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.process.heartbeat import Heartbeat
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry.metrics import DecodeMetrics

_log = structlog.get_logger(__name__)
_IDLE_WAIT_S = 0.25
_CLOSE_TIMEOUT_S = 30.0
_MAX_FAILED_STEPS = 3
_STEP_TIMEOUT_S = 60.0
_MEMORY_POLL_S = 0.005
_DELIVERY_INTERVAL_S = 0.008
"""No token waits longer for later ones that are delivered with it, and none waits if two steps take longer.
One by one, tokens of shorter steps cost the threads and processes on their way more time than the step."""


class _LaunchedBatch(NamedTuple):
    """A step, and the slots of the sequences that it was launched with; one of them may be shadowed."""

    step: LaunchedStep | LaunchedSteps
    slots: dict[Sequence, int]
    shadowed: Sequence | None


class DecodeEngine:
    """One thread that owns the model and every READY or RUNNING sequence.

        submit ──► inbox ──first token checked──► waiting ──room in the batch──► running ──► finished
                     │                               │                              │
                     └──────────── cancelled, failed, engine closed ────────────────┴──► closed

    An in-flight step may write rows of every sequence that it was launched with, so the engine waits for it
    before it releases any of their bytes.

    Args:
        memory: gives running sequences room for their rows.
        on_finished: takes a sequence whose completion has ended and whose KV is to be returned to prefill or
            retained (RETURNING).
        device: runs the steps; by default, made for the model's device.
        warm_up: what the thread runs before it takes sequences, with the runner of the steps.
        shadow_check: every so many steps one sequence's logits are compared with the torch path's; 0: never.
        num_threads: CPU threads of torch in the engine's thread; 0: those of the process.
        on_device_lost: called once if the device no longer works; all sequences have been closed.
        parts: the worker's ranks, which run the same steps.
    """

    def __init__(
        self,
        model: LanguageModel,
        metrics: DecodeMetrics,
        *,
        max_batch_size: int,
        clock: Callable[[], float],
        memory: SequenceMemory,
        on_finished: Callable[[Sequence], None],
        device: StepDevice | None = None,
        warm_up: Callable[[StepRunner | StepLanes], None] | None = None,
        shadow_check: int = 0,
        num_threads: int = 0,
        on_device_lost: Callable[[Exception], None] = lambda error: None,
        parts: Parts,
    ) -> None:
        self._model = model
        self._num_ranks = parts.num_ranks
        self._warm_up = warm_up
        self._on_device_lost = on_device_lost
        self._shadow_check = shadow_check
        self._num_threads = num_threads
        self._num_steps = 0
        self._num_captures = 0
        self._device = device or step_device(model)
        make_runner: Callable[..., StepRunner | StepLanes] = StepLanes
        if not self._device.captures:
            make_runner = partial(StepRunner, spec=parts.spec, tell_others=parts.tell_others)
        self._runner = make_runner(model, self._device, max_batch_size=max_batch_size, warn=_warn_of_capture)
        self._metrics = metrics
        self._max_batch_size = max_batch_size
        self._clock = clock
        self._memory = memory
        self._on_finished = on_finished
        self._num_arrived = 0
        self._condition = threading.Condition()
        self._inbox: deque[tuple[Sequence, SampledToken]] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._slots: dict[Sequence, tuple[int, Allocation]] = {}
        self._in_flight: _LaunchedBatch | None = None
        self._last_step_s = clock()
        self._undelivered: list[tuple[EventStream, GenerateEvent]] = []
        self._last_delivery_s = clock()
        self._stopping = False
        self._failed_steps = 0
        self.heartbeat = Heartbeat(clock, model.device.type)
        self._thread = threading.Thread(target=self._run, name="kvferry-decode-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Fail all sequences and end the thread. Idempotent."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def submit(self, sequence: Sequence, first_token: SampledToken) -> None:
        """Add a READY sequence, which the engine owns from now on. Any thread may call this."""
        with self._condition:
            if not self._stopping:
                self._inbox.append((sequence, first_token))
                self._condition.notify()
                return
        sequence.close(_closed())

    def wake(self) -> None:
        """End an idle wait, so that `cancelled` and `cut_off` are seen now. Any thread may call this."""
        with self._condition:
            self._condition.notify()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def healthy(self, heartbeat_timeout_s: float) -> bool:
        """Whether the engine is warm, its loop has a recent heartbeat and not every recent step failed."""
        fresh = self._clock() - self.heartbeat.last_s < heartbeat_timeout_s
        works = fresh and self._failed_steps < _MAX_FAILED_STEPS
        return self._thread.is_alive() and self._warm_up is None and works

    @property
    def is_wedged(self) -> bool:
        """See `Heartbeat.is_wedged`; for the sweeper's thread."""
        # the heartbeat is told a few times a second also while there is no work
        return self.heartbeat.is_wedged(self._thread, may_rest=self._warm_up is not None)

    # ---- the engine's thread -----------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            if self._warm_up is not None:
                try:
                    self._warm_up(self._runner)
                except Exception:  # requests will show whether anything is amiss
                    _log.exception("the warm-up failed")
                    self._runner.reset()
                self._count_captures("warm_up")
                self._warm_up = None
            while self._await_work():
                try:
                    self._iterate()
                except Exception as error:  # a failed step must not end the engine
                    _log.exception("decode step failed", batch_size=len(self._running))
                    self._failed_steps += 1
                    if self._has_lost_device(error):
                        self._in_flight = None
                        self._close_all(
                            WorkerUnavailable(f"the device is lost: {error}", reason="device_lost")
                        )
                        self._on_device_lost(error)
                        return
                    if isinstance(error, WorkerUnavailable):  # a rank is lost, which ends the process
                        self._close_all(error)
                        return
                    self._close_all(KvferryError(f"the decode step failed: {error}", reason="step_failed"))
        finally:
            self._close_all(_closed())

    def _has_lost_device(self, error: Exception) -> bool:
        """Whether no later step can succeed in this process; a kernel that does not end counts as well."""
        is_stuck = isinstance(error, KvferryError) and error.reason == "step_timeout"
        return (is_stuck and self._model.device.type == "cuda") or is_lost(error)

    def _await_work(self) -> bool:
        """Wait until there is something to do. Returns False when the engine must stop."""
        with self._condition:
            while not (self._stopping or self._inbox or self._waiting or self._running):
                self.heartbeat.last_s = self._clock()
                self.heartbeat.waits = True
                self._condition.wait(_IDLE_WAIT_S)
            self.heartbeat.last_s = self._clock()
            self.heartbeat.waits = False
            return not self._stopping

    def _iterate(self) -> None:
        with self._condition:
            arrived, self._inbox = self._inbox, deque()
        while arrived:
            self._begin(*arrived.popleft())
        self._end_early()
        while self._waiting and len(self._running) < self._max_batch_size and self._load(self._waiting[0]):
            self._join(self._waiting.popleft())
        self._show_batch_size(len(self._running))
        if self._running:
            self._step()
        if not self._running:
            self._finish_step()
            self._place()
            self._deliver()
        self._share_memory()

    # ---- memory ------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Give every running sequence room for the rows of its next step, the oldest first. Those for which
        there is no memory wait on the host."""
        num_steps = 1 + (self._in_flight is not None)
        for sequence in self._running:
            if sequence.lacks_room(num_steps):
                break
        else:
            return
        self._finish_step()
        for sequence in sorted(self._running, key=_arrival):
            if sequence.is_in_arena:
                self._memory.make_room(sequence, self._others(sequence))
        self._await_memory()

    def _load(self, sequence: Sequence) -> bool:
        """Bring a sequence back to the arena if it was swapped out. Returns whether it is there."""
        if not sequence.is_in_arena:
            self._finish_step()
            self._memory.make_room(sequence, self._others(sequence))
            self._await_memory()
        return sequence.is_in_arena

    def _await_memory(self) -> None:
        """Let the running sequences that were swapped out wait."""
        swapped = [sequence for sequence in self._running if not sequence.is_in_arena]
        for sequence in swapped:
            sequence.state = SequenceState.READY
        self._running = [sequence for sequence in self._running if sequence.is_in_arena]
        self._waiting = deque(sorted((*self._waiting, *swapped), key=_arrival))

    def _others(self, sequence: Sequence | None = None) -> list[Sequence]:
        """The engine's other sequences in the arena."""
        return [its for its in (*self._waiting, *self._running) if its is not sequence and its.is_in_arena]

    def _share_memory(self) -> None:
        """Admit requests again once no sequence is swapped out, and make a range for the first of them."""
        self._memory.admit_again(self._waiting)
        if self._memory.wants_compaction(self._others()):
            self._finish_step()
            self._memory.compact_for_queue(self._others())
        elif self._waiting and not self._running and not self._inbox:
            time.sleep(_MEMORY_POLL_S)

    # ---- steps -------------------------------------------------------------------------------------------

    def _end_early(self) -> None:
        """Close cancelled sequences, and finish those that must end with the tokens they have."""
        ending = [its for its in (*self._waiting, *self._running) if its.cancelled or its.cut_off]
        if not ending:
            return
        self._finish_step()
        for sequence in ending:
            if sequence.state in (SequenceState.READY, SequenceState.RUNNING):
                if sequence.cancelled:
                    sequence.close()
                else:
                    self._finish(sequence, "length")
        self._waiting = deque(s for s in self._waiting if s.state is SequenceState.READY)
        self._running = [s for s in self._running if s.state is SequenceState.RUNNING]

    def _begin(self, sequence: Sequence, first_token: SampledToken) -> None:
        """Count the token that prefill sampled; it may already end the completion."""
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self._waiting.append(sequence)
        try:
            sequence.sampler.observe(first_token.token_id)
            reason = sequence.take(first_token)
        except Exception as error:
            self._fail(sequence, error)
            return
        if reason is not None:
            self._waiting.remove(sequence)
            self._finish(sequence, reason)

    def _join(self, sequence: Sequence) -> None:
        self._deliver()  # the next step may take longer
        sequence.state = SequenceState.RUNNING
        self._running.append(sequence)
        if sequence.committed_s is not None:
            self._metrics.admit.labels(self._model.spec.name).observe(self._clock() - sequence.committed_s)

    def _step(self) -> None:
        """Launch a step for the running sequences and handle its tokens.

        If steps run ahead, handle the previous step's tokens instead, while the new step runs.
        """
        if self._in_flight is not None and self._in_flight.shadowed is not None:
            self._finish_step()  # no later step may be launched before it is repeated
            self._running = [its for its in self._running if its.state is SequenceState.RUNNING]
            if not self._running:
                return
        self._make_room()
        self._place()
        if not self._running:
            return
        if self._in_flight is not None and all(sequence.num_left <= 1 for sequence in self._running):
            launched = None  # the in-flight step gives every sequence its last token
        else:
            launched = self._launch()
        previous, self._in_flight = self._in_flight, launched
        if previous is not None:
            self._handle_tokens(previous)
        if not self._runner.runs_ahead:
            self._finish_step()

    def _place(self) -> None:
        """Give every running sequence a slot, and no other; the other slots stay as they are."""
        self._vacate()
        spare = self._runner.spare_slot
        if spare is not None and len(self._slots) == len(self._running):
            self._finish_step()
            self._vacate(spare)
        for sequence in self._running:
            if sequence not in self._slots:
                given = self._input(sequence, sequence.num_appended)
                self._slots[sequence] = self._runner.join(given), sequence.allocation

    def _input(self, sequence: Sequence, num_appended: int) -> StepInput:
        """Args: num_appended: rows of new tokens before the step."""
        return StepInput(
            caches=sequence.caches,
            num_appended=num_appended,
            token_id=sequence.last_token_id,
            position=sequence.position,
            num_left=sequence.num_left,
            stop_ids=sequence.stop_token_ids,
            sampler=sequence.sampler,
            written=sequence.written,
            name=sequence.name,
        )

    def _vacate(self, spare: int | None = None) -> None:
        """Empty the slots of sequences that have ended or moved, and the spare one."""
        for sequence, (slot, allocation) in list(self._slots.items()):
            is_running = sequence.state is SequenceState.RUNNING and sequence.is_in_arena
            if not is_running or sequence.allocation is not allocation or slot == spare:
                del self._slots[sequence]
                self._runner.leave(slot)

    def _launch(self) -> _LaunchedBatch:
        if self._in_flight is None:
            self._last_step_s = self._clock()
        # a step is not captured while another shape is likely to follow
        waits = bool(self._inbox or self._waiting)
        step = self._runner.launch(eager_steps=EAGER_STEPS if waits else 1)
        self._count_captures("load")
        for path in step.paths:
            self._metrics.decode_steps.labels(path.name, path.reason).inc()
        slots = {sequence: slot for sequence, (slot, _) in self._slots.items()}
        return _LaunchedBatch(step, slots, self._next_shadowed(slots))

    def _count_captures(self, when: Literal["warm_up", "load"]) -> None:
        captured = self._runner.captures.number
        self._metrics.captures.labels(when).inc(captured - self._num_captures)
        self._num_captures = captured

    def _next_shadowed(self, slots: dict[Sequence, int]) -> Sequence | None:
        """The sequence whose step is repeated, in turn, if this step's turn has come."""
        self._num_steps += 1
        if not self._shadow_check or self._num_steps % self._shadow_check:
            return None
        return list(slots)[self._num_steps // self._shadow_check % len(slots)]

    def _await_step(self) -> None:
        """Wait for the in-flight step; its tokens are handled later."""
        if self._in_flight is not None:
            self._in_flight.step.wait(_STEP_TIMEOUT_S)

    def _finish_step(self) -> None:
        """Wait for the in-flight step and handle its tokens."""
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            self._handle_tokens(launched)

    def _handle_tokens(self, launched: _LaunchedBatch) -> None:
        """Handle a step's tokens, for the sequences that are still running."""
        step = launched.step
        step.wait(_STEP_TIMEOUT_S)
        self._failed_steps = 0
        slots = step.drawn()
        taken: list[tuple[Sequence, FinishReason | None]] = []
        num_running = 0
        for sequence, slot in launched.slots.items():
            if sequence.state is not SequenceState.RUNNING:
                continue
            drawn = self._take(sequence, launched, slot, *slots[slot])
            if drawn is not None:
                token, reason = drawn
                taken.append((sequence, reason))
                self._undelivered.append((sequence.events, TokenGenerated(token=token)))
                num_running += reason is None
        # metrics first, so that a client that has read its stream's end finds its steps counted
        now_s = self._clock()
        step_s = now_s - self._last_step_s
        self._metrics.decode_step.labels(self._model.spec.name).observe(step_s)
        self._last_step_s = now_s
        self._show_batch_size(num_running)
        if now_s + step_s - self._last_delivery_s >= _DELIVERY_INTERVAL_S:
            self._deliver()
        for sequence, reason in taken:
            self._count(sequence, reason)
        self._running = [s for s in self._running if s.state is SequenceState.RUNNING]

    def _deliver(self) -> None:
        """Put the tokens of the last steps into their streams."""
        deliver(self._undelivered)
        self._undelivered.clear()
        self._last_delivery_s = self._clock()

    def _take(
        self,
        sequence: Sequence,
        launched: _LaunchedBatch,
        slot: int,
        token_id: int,
        is_valid: int,
        is_active: int,
    ) -> tuple[SampledToken, FinishReason | None] | None:
        """The sequence's next token, and why the completion ends with it if it does; None if it failed."""
        assert is_active, f"the step ended sequence {sequence.request.request_id} and the host did not"
        step = launched.step
        sequence.num_appended += 1
        try:
            if (error := step.error(slot)) is not None:
                raise error
            if not is_valid and (refusal := sequence.sampler.refusal()).reason != "invalid_logits":
                raise refusal  # the grammar's doing, and no kernel's
            if not is_valid or launched.shadowed is sequence:
                logits = self._second_opinion(sequence, slot, bool(is_valid))
                if logits is not None:
                    token = sequence.sampler.sample(logits)
                    self._place_again(sequence)
                    return token, sequence.take(token)
            if not is_valid:
                raise sequence.sampler.refusal()
            token = sequence.sampler.accept(token_id, step.logits(slot))
            return token, sequence.take(token)
        except Exception as failure:  # an error of one sequence must not fail the batch
            self._fail(sequence, failure)
            return None

    def _second_opinion(self, sequence: Sequence, slot: int, is_valid: bool) -> Tensor | None:
        """Repeat the step on the torch path (`shadow.py`). Returns logits to use instead; None if the step's
        stand, or nothing better can be had."""
        if self._num_ranks > 1:
            return None  # each rank has a part of the sequence
        shadow = ShadowStep(self._model, self._input(sequence, sequence.num_appended - 1))
        if not shadow.is_possible or not (shadow.ops if is_valid else shadow.has_kernels):
            return None
        with self._device.scope():
            opinion, logits = shadow.judge(self._runner.last_logits(slot) if is_valid else None)
        self._metrics.shadow_checks.labels(opinion).inc()
        return logits if opinion == "kernel_wrong" else None

    def _place_again(self, sequence: Sequence) -> None:
        """Let a sequence leave the batch until the next step, which then begins with what the host knows."""
        slot, _ = self._slots.pop(sequence)
        self._runner.leave(slot)
        if (
            self._in_flight is not None
        ):  # it was launched without this sequence, which had ended for the device
            self._in_flight.slots.pop(sequence, None)

    def _count(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Count a delivered token, which may end the completion."""
        if not sequence.request.probe:
            self._metrics.decode_tokens.labels(self._model.spec.name, sequence.resolved.method).inc()
        if sequence.num_appended == 1:
            sequence.enter_stage("decode")
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a completion. Bytes are released before the reader gets the end, unless KV must be returned."""
        self._await_step()
        self._deliver()
        if not sequence.request.probe:
            self._memory.observe(sequence.num_tokens)
        own_bytes = sum([its.used_bytes(sequence.num_appended) for its in sequence.caches])
        finished = GenerationFinished(
            finish_reason=reason,
            num_tokens=sequence.num_tokens,
            # segments that are packed while tokens are generated count as large in every rank
            cache_bytes=sequence.prompt_bytes + self._num_ranks * (own_bytes - sequence.own_bytes),
        )
        with sequence.lock:
            request = sequence.request
            goes_on = (request.store_history or request.session is not None) and not sequence.cancelled
            if goes_on:
                sequence.state = SequenceState.RETURNING
        if goes_on and request.store_history:
            sequence.enter_stage("return history")
            sequence.events.put(finished)
            self._on_finished(sequence)
        else:
            # The reader leaves with this event, and the rows must be retained by then.
            if goes_on:
                self._on_finished(sequence)
            else:
                sequence.close()
            sequence.events.put(finished)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if not isinstance(error, KvferryError):
            _log.error("sequence failed", request_id=sequence.request.request_id, exc_info=error)
            error = KvferryError(f"decoding the sequence failed: {error}", reason="sequence_failed")
        self._await_step()
        self._deliver()
        sequence.close(error)

    def _close_all(self, error: KvferryError) -> None:
        with contextlib.suppress(KvferryError, RuntimeError):  # a lost device does not write any more
            self._await_step()
        self._in_flight = None
        self._deliver()
        with self._condition:
            arrived, self._inbox = self._inbox, deque()
        for sequence in (*(s for s, _ in arrived), *self._waiting, *self._running):
            if sequence.state in (SequenceState.READY, SequenceState.RUNNING):
                sequence.close(error)
        self._waiting.clear()
        self._running = []
        self._slots = {}
        self._runner.reset()
        self._share_memory()
        self._show_batch_size(0)

    def _show_batch_size(self, num_sequences: int) -> None:
        self._metrics.batch_size.labels(self._model.spec.name).set(num_sequences)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _closed() -> WorkerUnavailable:
    return WorkerUnavailable("the decode worker is shutting down", reason="closed")


def _warn_of_capture(reason: str) -> None:
    _log.warning("a decode step cannot be captured; it runs eagerly", reason=reason)
