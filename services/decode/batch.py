"""The running batch: its sequences' slots in steps, and the step in flight. Only the engine's thread uses it.

    running sequences ──place──► slots ──launch──► in flight ──done──► a token for each sequence

A step can be captured only if batched kernels run all of its attention. So where steps are captured there are
two lanes, each with slots and steps of its own: one for sequences that batched kernels run whole, and one for
the others. Where they are not, one lane has all: a model reads its weights once for a larger batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import structlog
from torch import Tensor

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.parts import Parts
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.services.decode.shadow import ShadowStep
from kvferry.services.decode.slots import Captures, StepRunner, lane_of
from kvferry.services.decode.step import LaunchedStep, StepInput
from kvferry.shared.cache.arena import Allocation
from kvferry.shared.device.step_device import StepDevice
from kvferry.shared.errors import WorkerUnavailable
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry.metrics import DecodeMetrics

_log = structlog.get_logger(__name__)
_STEP_TIMEOUT_S = 60.0


class _Place(NamedTuple):
    """Where a sequence is, with the memory that it had when it was placed."""

    lane: int
    slot: int
    allocation: Allocation


@dataclass(frozen=True)
class LaunchedBatch:
    """A step of every lane that has sequences.

    Attributes:
        steps: by the lane's number.
        places: of the sequences that it was launched with.
        shadowed: a sequence whose step is repeated in torch.
    """

    steps: Mapping[int, LaunchedStep]
    places: dict[Sequence, _Place]
    shadowed: Sequence | None

    def wait(self) -> None:
        """Wait until the device has finished. Raises: KvferryError: it does not."""
        for step in self.steps.values():
            step.wait(_STEP_TIMEOUT_S)

    def drawn(self) -> dict[Sequence, list[int]]:
        """Return for each sequence the token, whether one could be drawn, and whether its slot was active."""
        by_lane = {lane: step.drawn() for lane, step in self.steps.items()}
        return {sequence: by_lane[place.lane][place.slot] for sequence, place in self.places.items()}


class Batch:
    """Gives running sequences slots, and launches their steps.

    Args: parts: the worker's ranks. If there are several, all have the same sequences in the same slots.

    Attributes:
        lanes: one or two; see above.
        in_flight: the step that was launched last, until its tokens are handled.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: StepDevice,
        metrics: DecodeMetrics,
        config: DecodeConfig,
        parts: Parts,
    ) -> None:
        self._model = model
        self._device = device
        self._metrics = metrics
        self._shadow_check = config.shadow_check
        self._parts = parts
        self._captures = Captures()
        self.lanes = [
            StepRunner(
                model,
                device,
                max_batch_size=config.max_batch_size,
                warn=lambda reason: _log.warning("a step cannot be captured; it runs eagerly", reason=reason),
                spec=parts.spec,
                captures=self._captures,
            )
            for _ in range(2 if device.captures else 1)
        ]
        self.in_flight: LaunchedBatch | None = None
        self._places: dict[Sequence, _Place] = {}
        self._num_steps = 0
        self._num_captures = 0

    def place(self, sequences: Iterable[Sequence]) -> None:
        """Give each of these sequences a slot if it has none; the other slots stay as they are."""
        for sequence in sequences:
            if sequence not in self._places:
                given = _input(sequence, sequence.num_appended)
                lane = lane_of(given.caches, given.num_appended) if len(self.lanes) > 1 else 0
                slot = self.lanes[lane].join(given)
                self._parts.tell_others("place", slot, sequence.name, sequence.num_appended)
                self._places[sequence] = _Place(lane, slot, sequence.allocation)

    def vacate(self, spare: tuple[int, int] | None = None) -> tuple[int, int] | None:
        """Empty the slots of sequences that have ended or moved. Args: spare: one more, with its lane.

        Returns: a spare slot that is left (`StepRunner.spare_slot`), with its lane.
        """
        for sequence, place in list(self._places.items()):
            is_running = sequence.state is SequenceState.RUNNING and sequence.is_in_arena
            if not is_running or sequence.allocation is not place.allocation or place[:2] == spare:
                self._remove(sequence)
        for lane, runner in enumerate(self.lanes):
            if (slot := runner.spare_slot) is not None:
                return lane, slot
        return None

    @property
    def num_placed(self) -> int:
        return len(self._places)

    @property
    def runs_ahead(self) -> bool:
        """See `StepRunner.runs_ahead`."""
        return all([runner.runs_ahead for runner in self.lanes if runner.num_sequences])

    def launch(self, *, eager_steps: int) -> LaunchedBatch:
        """Launch a step of every lane that has sequences. Args: as of `StepRunner.launch`."""
        steps: dict[int, LaunchedStep] = {}
        for lane, runner in enumerate(self.lanes):
            if runner.num_sequences:
                steps[lane] = step = runner.launch(eager_steps=eager_steps)
                self._metrics.decode_steps.labels(step.path.name, step.path.reason).inc()
        if self._captures.number > self._num_captures:
            self.count_captures("load")
        return LaunchedBatch(steps, dict(self._places), self._next_shadowed() if self._shadow_check else None)

    def count_captures(self, when: Literal["warm_up", "load"]) -> None:
        """Count the captures since the last call."""
        self._metrics.captures.labels(when).inc(self._captures.number - self._num_captures)
        self._num_captures = self._captures.number

    def await_step(self) -> None:
        """Wait for the step in flight; its tokens are handled later."""
        if self.in_flight is not None:
            self.in_flight.wait()

    def token(
        self, sequence: Sequence, launched: LaunchedBatch, token_id: int, *, is_valid: bool
    ) -> SampledToken:
        """Return the sequence's next token, from a step that is done.

        Args: token_id, is_valid: see `LaunchedBatch.drawn`.
        Raises: Exception: why the sequence fails.
        """
        lane, slot, _ = launched.places[sequence]
        step = launched.steps[lane]
        if slot in step.errors:
            raise step.errors[slot]
        if not is_valid and (refusal := sequence.sampler.refusal()).reason != "invalid_logits":
            raise refusal  # caused by the grammar, not by a kernel
        if not is_valid or launched.shadowed is sequence:
            logits = self._second_opinion(sequence, lane, slot, is_valid)
            if logits is not None:
                token = sequence.sampler.sample(logits)
                # it leaves its slot; the next step places it again with what the host knows
                self._remove(sequence)
                if self.in_flight is not None:  # launched without it: for the device it had ended
                    self.in_flight.places.pop(sequence, None)
                return token
        if not is_valid:
            raise sequence.sampler.refusal()
        logits = None if step.host_logits is None else step.host_logits[slot]
        return sequence.sampler.accept(token_id, logits)

    def reset(self) -> None:
        """Forget all sequences and steps, whatever state a failure has left them in."""
        self.in_flight = None
        self._places = {}
        for runner in self.lanes:
            runner.reset()
        with suppress(WorkerUnavailable):  # nothing is left of a lost rank
            self._parts.tell_others("reset")

    def _remove(self, sequence: Sequence) -> None:
        lane, slot, _ = self._places.pop(sequence)
        self.lanes[lane].leave(slot)
        self._parts.tell_others("vacate", slot)

    def _next_shadowed(self) -> Sequence | None:
        """Return the sequence whose step is repeated, each in turn; None unless a repetition is due."""
        self._num_steps += 1
        if self._num_steps % self._shadow_check:
            return None
        return list(self._places)[self._num_steps // self._shadow_check % len(self._places)]

    def _second_opinion(self, sequence: Sequence, lane: int, slot: int, is_valid: bool) -> Tensor | None:
        """Repeat the step on the torch path (`shadow.py`). Returns logits to use instead; None if the step's
        own are used, or no better ones are available."""
        if self._parts.num_ranks > 1:
            return None  # each rank has a part of the sequence
        shadow = ShadowStep(self._model, _input(sequence, sequence.num_appended - 1))
        if not shadow.is_possible or not (shadow.ops if is_valid else shadow.has_kernels):
            return None
        with self._device.scope():
            opinion, logits = shadow.judge(self.lanes[lane].last_logits(slot) if is_valid else None)
        self._metrics.shadow_checks.labels(opinion).inc()
        return logits if opinion == "kernel_wrong" else None


def _input(sequence: Sequence, num_appended: int) -> StepInput:
    """Return a sequence's input to its first step. Args: num_appended: rows of new tokens before the step."""
    return StepInput(
        caches=sequence.caches,
        num_appended=num_appended,
        token_id=sequence.token_ids[-1],
        position=sequence.position,
        num_left=sequence.num_left,
        stop_ids=sequence.ending.stop_token_ids,
        sampler=sequence.sampler,
        written=sequence.written,
    )
