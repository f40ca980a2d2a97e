"""The decode engine: continuous batching in one thread.

Takes complete sequences from the receiver, runs them together step by step, and puts each token into its
request's stream. Finished sequences go to the history return. Sequences of any length and method share a
batch, and no result depends on the other sequences. A step samples on the model's device (`step.py`). If
steps are captured, the next one runs while this thread handles the last one's tokens: stop strings, delivery,
admission.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import structlog
import torch

from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.services.decode.step import StepInput
from kvferry.services.decode.step_device import StepDevice, step_device
from kvferry.services.decode.step_runner import Flight, StepRunner
from kvferry.shared.control.messages import FinishReason, GenerationFinished, TokenGenerated
from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.metrics import DecodeMetrics
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.sampling.params import SampledToken

_log = structlog.get_logger(__name__)
_IDLE_WAIT_S = 0.25
_CLOSE_TIMEOUT_S = 30.0
_MAX_FAILED_STEPS = 3
_STEP_TIMEOUT_S = 60.0


class DecodeEngine:
    """One thread that owns the model and every READY or RUNNING sequence.

        submit ──► inbox ──first token checked──► waiting ──room in the batch──► running ──► finished
                     │                               │                              │
                     └──────────── cancelled, failed, engine closed ────────────────┴──► closed

    An in-flight step may write rows of every sequence that it was launched with, so the engine waits for it
    before it releases any of their bytes.

    Args:
        on_finished: takes a sequence whose completion has ended and whose generated KV is to be returned to
            prefill (RETURNING).
        device: runs the steps; by default, made for the model's device.
    """

    def __init__(
        self,
        model: LanguageModel,
        metrics: DecodeMetrics,
        *,
        max_batch_size: int,
        clock: Callable[[], float],
        on_finished: Callable[[Sequence], None],
        device: StepDevice | None = None,
    ) -> None:
        self._model = model
        self._runner = StepRunner(model, device or step_device(model.device), warn=_warn_of_capture)
        self._metrics = metrics
        self._max_batch_size = max_batch_size
        self._clock = clock
        self._on_finished = on_finished
        self._condition = threading.Condition()
        self._inbox: deque[tuple[Sequence, SampledToken]] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._placed: list[Sequence] = []
        self._flight: Flight | None = None
        self._last_step_s = clock()
        self._stopping = False
        self._failed_steps = 0
        self._heartbeat_s = clock()
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
        """Whether the loop has a recent heartbeat and not every recent step failed."""
        fresh = self._clock() - self._heartbeat_s < heartbeat_timeout_s
        return self._thread.is_alive() and fresh and self._failed_steps < _MAX_FAILED_STEPS

    # ---- the engine's thread -----------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._await_work():
                try:
                    self._turn()
                except Exception as error:  # a failed step must not end the engine
                    _log.exception("decode step failed", batch_size=len(self._running))
                    self._failed_steps += 1
                    self._close_all(KvferryError(f"the decode step failed: {error}", reason="step_failed"))
        finally:
            self._close_all(_closed())

    def _await_work(self) -> bool:
        """Wait until there is something to do. Returns False when the engine must stop."""
        with self._condition:
            while not (self._stopping or self._inbox or self._waiting or self._running):
                self._heartbeat_s = self._clock()
                self._condition.wait(_IDLE_WAIT_S)
            self._heartbeat_s = self._clock()
            return not self._stopping

    def _turn(self) -> None:
        with self._condition:
            arrived, self._inbox = self._inbox, deque()
        while arrived:
            self._begin(*arrived.popleft())
        cancelled = [s for s in (*self._waiting, *self._running) if s.cancelled]
        if cancelled:
            self._settle()
        for sequence in cancelled:
            sequence.close()
        self._waiting = deque(s for s in self._waiting if s.state is not SequenceState.CLOSED)
        self._running = [s for s in self._running if s.state is not SequenceState.CLOSED]
        self._cut_off()
        while self._waiting and len(self._running) < self._max_batch_size:
            self._join(self._waiting.popleft())
        self._show_batch_size(len(self._running))
        if self._running:
            self._step()
        if not self._running:
            self._land()
            self._release()

    def _cut_off(self) -> None:
        """Finish the sequences that must end with the tokens they have."""
        if not any(sequence.cut_off for sequence in (*self._waiting, *self._running)):
            return
        self._land()
        for sequence in [s for s in (*self._waiting, *self._running) if s.cut_off]:
            self._finish(sequence, "length")
        self._waiting = deque(s for s in self._waiting if not s.cut_off)
        self._running = [s for s in self._running if not s.cut_off]

    def _begin(self, sequence: Sequence, first_token: SampledToken) -> None:
        """Count the token that prefill sampled; it may already end the completion."""
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
        sequence.state = SequenceState.RUNNING
        self._running.append(sequence)
        if sequence.committed_s is not None:
            self._metrics.admit.labels(self._model.spec.name).observe(self._clock() - sequence.committed_s)

    def _step(self) -> None:
        """Launch a step for the running sequences and handle its tokens.

        If steps run ahead, handle the previous step's tokens instead, while the new step runs.
        """
        if self._placed != self._running:
            self._land()
            if not self._running:
                return
            self._place()
        if self._flight is not None and all(sequence.num_left <= 1 for sequence in self._running):
            flight = None  # the in-flight step gives every sequence its last token
        else:
            flight = self._launch()
        if self._runner.runs_ahead:
            flight, self._flight = self._flight, flight
        if flight is not None:
            self._take_up(flight)

    def _place(self) -> None:
        """Place the running sequences as the batch. No step may be in flight."""
        batch = list(self._running)
        inputs = [
            StepInput(
                token_id=sequence.last_token_id,
                position=sequence.position,
                num_left=sequence.num_left,
                stop_ids=sequence.stop_token_ids,
                sampler=sequence.sampler,
            )
            for sequence in batch
        ]
        self._runner.place([s.caches for s in batch], [s.num_appended for s in batch], inputs)
        self._placed = batch

    def _release(self) -> None:
        self._runner.release()
        self._placed = []

    def _launch(self) -> Flight:
        if self._flight is None:
            self._last_step_s = self._clock()
        flight = self._runner.launch()
        self._metrics.decode_steps.labels(flight.path.name, flight.path.because).inc()
        return flight

    def _settle(self) -> None:
        """Wait for the in-flight step; its tokens are handled later."""
        if self._flight is not None:
            self._flight.wait(_STEP_TIMEOUT_S)

    def _land(self) -> None:
        """Wait for the in-flight step and handle its tokens."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._take_up(flight)

    def _take_up(self, flight: Flight) -> None:
        """Handle a step's tokens, for the sequences that are still running."""
        flight.wait(_STEP_TIMEOUT_S)
        self._failed_steps = 0
        batch = [(i, s) for i, s in enumerate(self._placed) if s.state is SequenceState.RUNNING]
        slots = flight.drawn()
        drawn = [self._take(sequence, flight, slot, slots[slot]) for slot, sequence in batch]
        # metrics first, so that a client that has read its stream's end finds its steps counted
        now_s = self._clock()
        self._metrics.decode_step.labels(self._model.spec.name).observe(now_s - self._last_step_s)
        self._last_step_s = now_s
        self._show_batch_size(sum(token is not None and token[1] is None for token in drawn))
        for (_, sequence), token in zip(batch, drawn, strict=True):
            if token is not None:
                self._deliver(sequence, token)
        self._running = [s for s in self._running if s.state is SequenceState.RUNNING]

    def _take(
        self, sequence: Sequence, flight: Flight, slot: int, drawn: tuple[int, bool, bool]
    ) -> tuple[SampledToken, FinishReason | None] | None:
        """The sequence's next token, and why the completion ends with it if it does; None if it failed."""
        token_id, is_valid, is_active = drawn
        assert is_active, f"the step ended sequence {sequence.request.request_id} and the host did not"
        sequence.num_appended += 1
        try:
            if slot in flight.errors:
                raise flight.errors[slot]
            if not is_valid:
                raise sequence.sampler.refusal()
            token = sequence.sampler.accept(token_id, flight.logits(slot))
            return token, sequence.take(token)
        except Exception as failure:  # an error of one sequence must not fail the batch
            self._fail(sequence, failure)
            return None

    def _deliver(self, sequence: Sequence, drawn: tuple[SampledToken, FinishReason | None]) -> None:
        token, reason = drawn
        if not sequence.request.probe:
            self._metrics.decode_tokens.labels(self._model.spec.name, sequence.resolved.method).inc()
        sequence.events.put(TokenGenerated(token=token))
        if sequence.num_appended == 1:
            sequence.enter_stage("decode")
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a completion. Bytes are released before the reader gets the end, unless KV must be returned."""
        self._settle()
        finished = GenerationFinished(
            finish_reason=reason,
            num_tokens=sequence.num_tokens,
            cache_bytes=sum(cache.used_bytes(sequence.num_appended) for cache in sequence.caches),
        )
        with sequence.lock:
            returning = sequence.request.store_history and not sequence.cancelled
            if returning:
                sequence.state = SequenceState.RETURNING
        if returning:
            sequence.enter_stage("return history")
            sequence.events.put(finished)
            self._on_finished(sequence)
        else:
            sequence.close()
            sequence.events.put(finished)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if not isinstance(error, KvferryError):
            _log.error("sequence failed", request_id=sequence.request.request_id, exc_info=error)
            error = KvferryError(f"decoding the sequence failed: {error}", reason="sequence_failed")
        self._settle()
        sequence.close(error)

    def _close_all(self, error: KvferryError) -> None:
        with contextlib.suppress(KvferryError, RuntimeError):  # a lost device does not write any more
            self._settle()
        self._flight = None
        self._release()
        with self._condition:
            arrived, self._inbox = self._inbox, deque()
        for sequence in (*(s for s, _ in arrived), *self._waiting, *self._running):
            if sequence.state in (SequenceState.READY, SequenceState.RUNNING):
                sequence.close(error)
        self._waiting.clear()
        self._running = []
        self._show_batch_size(0)

    def _show_batch_size(self, num_sequences: int) -> None:
        self._metrics.batch_size.labels(self._model.spec.name).set(num_sequences)


def _warn_of_capture(reason: str) -> None:
    _log.warning("a decode step cannot be captured; it runs eagerly", reason=reason)


def _closed() -> WorkerUnavailable:
    return WorkerUnavailable("the decode worker is shutting down", reason="closed")
