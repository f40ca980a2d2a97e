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
from operator import attrgetter

import structlog
import torch

from kvferry.kernels.quarantine import is_lost
from kvferry.services.decode.batch import Batch, LaunchedBatch
from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.events import EventStream, deliver
from kvferry.services.decode.memory import SequenceMemory
from kvferry.services.decode.parts import Parts
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.services.decode.slots import StepRunner
from kvferry.services.decode.step import EAGER_STEPS
from kvferry.shared.control.messages import FinishReason, GenerateEvent, GenerationFinished, TokenGenerated
from kvferry.shared.device.cuda_device import step_device
from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.process.heartbeat import Heartbeat
from kvferry.shared.telemetry.metrics import DecodeMetrics

_log = structlog.get_logger(__name__)
_IDLE_WAIT_S = 0.25
_CLOSE_TIMEOUT_S = 30.0
_MAX_FAILED_STEPS = 3
_MEMORY_POLL_S = 0.005
_ARRIVAL = attrgetter("arrival")
_DELIVERY_INTERVAL_S = 0.008
"""No token waits longer for later ones that are delivered with it, and none waits if two steps take longer.
One by one, tokens of shorter steps cost the threads and processes on their way more time than the step."""


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
        warm_up: what the thread runs before it takes sequences, with the batch's lanes.
        on_device_lost: called once if the device no longer works; all sequences have been closed.
        parts: the worker's ranks, which run the same steps.
    """

    def __init__(
        self,
        model: LanguageModel,
        metrics: DecodeMetrics,
        config: DecodeConfig,
        *,
        clock: Callable[[], float],
        parts: Parts,
        memory: SequenceMemory,
        on_finished: Callable[[Sequence], None],
        warm_up: Callable[[list[StepRunner]], None] | None,
        on_device_lost: Callable[[Exception], None],
    ) -> None:
        self._model = model
        self._warm_up = warm_up
        self._on_device_lost = on_device_lost
        self._config = config
        self._max_batch_size = config.max_batch_size
        self._batch = Batch(model, step_device(model), metrics, config, parts)
        self._metrics = metrics
        self._batch_size = metrics.batch_size.labels(model.spec.name)
        self._clock = clock
        self._memory = memory
        self._on_finished = on_finished
        self._num_arrived = 0
        self._condition = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
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

    def submit(self, sequence: Sequence) -> None:
        """Add a READY sequence, which the engine owns from now on. Any thread may call this."""
        with self._condition:
            if not self._stopping:
                self._inbox.append(sequence)
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
        """Return whether the engine is warm, its heartbeat recent, and not every recent step failed."""
        fresh = self._clock() - self.heartbeat.last_s < heartbeat_timeout_s
        works = fresh and self._failed_steps < _MAX_FAILED_STEPS
        return self._thread.is_alive() and self._warm_up is None and works

    @property
    def is_wedged(self) -> bool:
        """See `Heartbeat.is_wedged`; for the sweeper's thread."""
        # the heartbeat is told a few times a second also while there is no work
        return self.heartbeat.is_wedged(self._thread, may_rest=self._warm_up is not None)

    @torch.inference_mode()
    def _run(self) -> None:
        if self._config.threads and self._config.tensor_parallel == 1:
            torch.set_num_threads(self._config.threads)
        try:
            if self._warm_up is not None:
                try:
                    self._warm_up(self._batch.lanes)
                except Exception:  # requests will show whether anything is amiss
                    _log.exception("the warm-up failed")
                    self._batch.reset()
                self._batch.count_captures("warm_up")
                self._warm_up = None
            while self._await_work():
                try:
                    self._iterate()
                except Exception as error:  # a failed step must not end the engine
                    _log.exception("decode step failed", batch_size=len(self._running))
                    self._failed_steps += 1
                    if self._has_lost_device(error):
                        self._batch.in_flight = None
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
        """Return whether no later step can succeed in this process, also because a kernel does not end."""
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
        while self._inbox:
            self._begin(self._inbox.popleft())
        self._end_early()
        while self._waiting and len(self._running) < self._max_batch_size and self._load(self._waiting[0]):
            self._deliver()  # the next step may take longer
            sequence = self._waiting.popleft()
            sequence.state = SequenceState.RUNNING
            self._running.append(sequence)
            if (arrived_s := sequence.committed_s) is not None:
                self._metrics.admit.labels(self._model.spec.name).observe(self._clock() - arrived_s)
        self._batch_size.set(len(self._running))
        if self._running:
            self._step()
        if not self._running:
            self._finish_step()
            self._place()
            self._deliver()
        self._share_memory()

    def _make_room(self) -> None:
        """Give every running sequence room for the rows of its next step, the oldest first. Those for which
        there is no memory wait on the host."""
        num_steps = 1 + (self._batch.in_flight is not None)
        if not any([sequence.lacks_room(num_steps) for sequence in self._running]):
            return
        self._finish_step()
        for sequence in sorted(self._running, key=_ARRIVAL):
            if sequence.is_in_arena:
                self._memory.make_room(sequence, self._others(sequence))
        self._await_memory()

    def _load(self, sequence: Sequence) -> bool:
        """Bring a sequence back to the arena if it was swapped out. Returns whether it is in the arena."""
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
        self._waiting = deque(sorted((*self._waiting, *swapped), key=_ARRIVAL))

    def _others(self, sequence: Sequence | None = None) -> list[Sequence]:
        return [
            other for other in (*self._waiting, *self._running) if other is not sequence and other.is_in_arena
        ]

    def _share_memory(self) -> None:
        """Admit requests again once no sequence is swapped out, and make a range for the first of them."""
        self._memory.admit_again(self._waiting)
        if self._memory.wants_compaction(self._others):
            self._finish_step()
            self._memory.compact_for_queue(self._others())
        elif self._waiting and not self._running and not self._inbox:
            time.sleep(_MEMORY_POLL_S)

    def _end_early(self) -> None:
        """Close cancelled sequences, and finish those that must end with the tokens they have."""
        ending = [each for each in (*self._waiting, *self._running) if each.cancelled or each.cut_off]
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

    def _begin(self, sequence: Sequence) -> None:
        """Count the tokens that prefill sampled; the last may already end the completion."""
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self._waiting.append(sequence)
        first_token = sequence.first_token
        assert first_token is not None, "the sequence has arrived"
        try:
            for token_id in (*sequence.draft, first_token.token_id):
                sequence.sampler.observe(token_id)
                if (reason := sequence.take(token_id)) is not None:
                    break
            sequence.num_appended = sequence.num_tokens - 1
        except Exception as error:
            self._fail(sequence, error)
        else:
            if reason is None:
                return
            self._finish(sequence, reason)
        self._waiting.remove(sequence)

    def _step(self) -> None:
        """Launch a step for the running sequences and handle its tokens.

        If steps run ahead, handle the previous step's tokens instead, while the new step runs.
        """
        batch = self._batch
        if batch.in_flight is not None and batch.in_flight.shadowed is not None:
            self._finish_step()  # the shadow check repeats it before a later step may be launched
        self._make_room()
        self._place()
        if not self._running:
            return
        previous, batch.in_flight = batch.in_flight, self._launch()
        if previous is not None:
            self._handle_tokens(previous)
        if not batch.runs_ahead:
            self._finish_step()

    def _place(self) -> None:
        """Give every running sequence a slot, and no other; the other slots stay as they are."""
        spare = self._batch.vacate()
        if spare is not None and self._batch.num_placed == len(self._running):
            self._finish_step()
            self._batch.vacate(spare)
        self._batch.place(self._running)

    def _launch(self) -> LaunchedBatch | None:
        """Launch a step; None if the one in flight gives every sequence its last token."""
        if self._batch.in_flight is None:
            self._last_step_s = self._clock()
        elif all(sequence.num_left <= 1 for sequence in self._running):
            return None
        # a step is not captured while another shape is likely to follow
        waits = bool(self._inbox or self._waiting)
        return self._batch.launch(eager_steps=EAGER_STEPS if waits else 1)

    def _finish_step(self) -> None:
        launched, self._batch.in_flight = self._batch.in_flight, None
        if launched is not None:
            self._handle_tokens(launched)

    def _handle_tokens(self, launched: LaunchedBatch) -> None:
        """Handle a step's tokens, for the sequences that are still running."""
        launched.wait()
        self._failed_steps = 0
        taken: list[tuple[Sequence, FinishReason | None]] = []
        num_running = 0
        for sequence, (token_id, is_valid, is_active) in launched.drawn().items():
            if sequence.state is not SequenceState.RUNNING:
                continue
            assert is_active, f"the step ended sequence {sequence.request.request_id} and the host did not"
            sequence.num_appended += 1
            try:
                token = self._batch.token(sequence, launched, token_id, is_valid=bool(is_valid))
                reason = sequence.take(token.token_id)
            except Exception as failure:  # an error of one sequence must not fail the batch
                self._fail(sequence, failure)
                continue
            taken.append((sequence, reason))
            self._undelivered.append((sequence.events, TokenGenerated(token=token)))
            num_running += reason is None
        # metrics first, so that a client that has read its stream's end finds its steps counted
        now_s = self._clock()
        step_s = now_s - self._last_step_s
        self._metrics.decode_step.labels(self._model.spec.name).observe(step_s)
        self._last_step_s = now_s
        self._batch_size.set(num_running)
        if now_s + step_s - self._last_delivery_s >= _DELIVERY_INTERVAL_S:
            self._deliver()
        for sequence, reason in taken:
            sequence.metrics.decode_tokens.labels(self._model.spec.name, sequence.resolved.method).inc()
            if sequence.num_appended == len(sequence.draft) + 1:
                sequence.enter_stage("decode")
            if reason is not None:
                self._finish(sequence, reason)
        self._running = [s for s in self._running if s.state is SequenceState.RUNNING]

    def _deliver(self) -> None:
        """Put the tokens of the last steps into their streams."""
        deliver(self._undelivered)
        self._undelivered.clear()
        self._last_delivery_s = self._clock()

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a completion. Bytes are released before the reader gets the end, unless KV must be returned."""
        self._batch.await_step()
        self._deliver()
        sequence.lengths.append(sequence.num_tokens)
        in_ranks = [part.prompt_bytes for part in sequence.arrived.values()]
        own_bytes = sum([cache.used_bytes(sequence.num_appended) for cache in sequence.caches])
        finished = GenerationFinished(
            finish_reason=reason,
            num_tokens=sequence.num_tokens,
            # segments that are packed while tokens are generated count as large in every rank
            cache_bytes=sum(in_ranks) + len(in_ranks) * (own_bytes - sequence.arrived[0].prompt_bytes),
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
        self._batch.await_step()
        self._deliver()
        sequence.close(error)

    def _close_all(self, error: KvferryError) -> None:
        with contextlib.suppress(KvferryError, RuntimeError):  # a lost device does not write any more
            self._batch.await_step()
        self._batch.in_flight = None
        self._deliver()
        with self._condition:
            arrived, self._inbox = self._inbox, deque()
        for sequence in (*arrived, *self._waiting, *self._running):
            if sequence.state in (SequenceState.READY, SequenceState.RUNNING):
                sequence.close(error)
        self._waiting.clear()
        self._running = []
        self._batch.reset()
        self._share_memory()
        self._batch_size.set(0)


def _closed() -> WorkerUnavailable:
    return WorkerUnavailable("the decode worker is shutting down", reason="closed")
