"""Steps of a batch in two lanes: sequences that batched kernels run whole, and the others beside them.

A step can be captured only if batched kernels run all of its attention. One sequence of a method without such
a kernel therefore has a step of its own, with others like it, and the batch's other sequences keep theirs.
Where steps are not captured, the engine uses one `StepRunner` for all: a model reads its weights once for a
larger batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvferry.services.decode.step import (
    Captures,
    LaunchedStep,
    StepDevice,
    StepInput,
    StepPath,
    StepRunner,
)
from kvferry.shared.model.interface import LanguageModel

_NUM_LANES = 2


@dataclass(frozen=True)
class LaunchedSteps:
    """One step of every lane that has sequences, by the lane's number; otherwise as `LaunchedStep`."""

    lanes: Mapping[int, LaunchedStep]

    @property
    def paths(self) -> list[StepPath]:
        return [step.path for step in self.lanes.values()]

    def wait(self, timeout_s: float) -> None:
        """Wait until the device has finished. Raises: KvferryError: a step took more than timeout_s."""
        for step in self.lanes.values():
            step.wait(timeout_s)

    def drawn(self) -> dict[int, list[int]]:
        return {
            slot * _NUM_LANES + lane: drawn
            for lane, step in self.lanes.items()
            for slot, drawn in step.drawn().items()
        }

    def logits(self, slot: int) -> Tensor | None:
        return self.lanes[slot % _NUM_LANES].logits(slot // _NUM_LANES)

    def error(self, slot: int) -> Exception | None:
        return self.lanes[slot % _NUM_LANES].error(slot // _NUM_LANES)


class StepLanes:
    """Places sequences and launches their steps, on one thread; the interface is that of `StepRunner`.

    A sequence's slot is `lane's slot * number of lanes + lane`.

    Args: as of `StepRunner`.
    """

    def __init__(
        self, model: LanguageModel, device: StepDevice, *, max_batch_size: int, warn: Callable[[str], None]
    ) -> None:
        self._lanes = [
            StepRunner(model, device, max_batch_size=max_batch_size, warn=warn) for _ in range(_NUM_LANES)
        ]

    def join(self, given: StepInput) -> int:
        """Place a sequence. Returns its slot."""
        lane = int(any(cache.batched(given.num_appended) is None for cache in given.caches))
        return self._lanes[lane].join(given) * _NUM_LANES + lane

    def last_logits(self, slot: int) -> Tensor:
        """See `StepRunner.last_logits`."""
        its_slot, lane = divmod(slot, _NUM_LANES)
        return self._lanes[lane].last_logits(its_slot)

    def leave(self, slot: int) -> None:
        """Remove a sequence, and drop all references to it."""
        its_slot, lane = divmod(slot, _NUM_LANES)
        self._lanes[lane].leave(its_slot)

    def reset(self) -> None:
        """Forget all slots and steps, whatever state a failure has left them in. No step may be in flight."""
        for runner in self._lanes:
            runner.reset()

    @property
    def captures(self) -> Captures:
        """See `StepRunner`."""
        lanes = [runner.captures for runner in self._lanes]
        return Captures(number=sum(its.number for its in lanes), seconds=sum(its.seconds for its in lanes))

    @property
    def rows_are_launched(self) -> bool:
        """See `StepRunner.rows_are_launched`."""
        return all(runner.rows_are_launched for runner in self._lanes if runner.num_sequences)

    @property
    def spare_slot(self) -> int | None:
        for lane, runner in enumerate(self._lanes):
            if runner.spare_slot is not None:
                return runner.spare_slot * _NUM_LANES + lane
        return None

    @property
    def runs_ahead(self) -> bool:
        return all(runner.runs_ahead for runner in self._lanes if runner.num_sequences)

    def launch(self, *, eager_steps: int = 0) -> LaunchedSteps:
        """See `StepRunner.launch`."""
        running = [(lane, runner) for lane, runner in enumerate(self._lanes) if runner.num_sequences]
        return LaunchedSteps({lane: runner.launch(eager_steps=eager_steps) for lane, runner in running})
