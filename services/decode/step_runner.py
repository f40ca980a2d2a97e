"""Runs decode steps: as CUDA graphs if batched kernels serve the whole batch, otherwise eagerly.

The engine places a batch and launches steps, and reads each step's tokens from a `Flight`. Every `StepShape`
(number of slots, kernels, sampling) has its own buffers and graph; the most recently used shapes are cached.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import in_buckets
from kvferry.services.decode.attention import Members
from kvferry.services.decode.step import DecodeStep, StepInput, StepShape
from kvferry.services.decode.step_device import StepDevice
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.interface import LanguageModel

MAX_SHAPES = 24
"""Limit on cached shapes, each with its memory and graph."""
_POLL_S = 50e-6


@dataclass(frozen=True, kw_only=True)
class StepPath:
    """How a step runs.

    Attributes:
        name: "graph" or "eager".
        because: why a step runs eagerly: the names of the formats and attentions without a batched kernel,
            else "cpu", "capture_failed", or "torch" if kernels are off or do not support the model; "" for a
            graph.
    """

    name: dispatch.StepPathName
    because: str = ""


class Flight:
    """A step that has been launched.

    Args:
        drawn: int64 `[3, S]` on the host, as `DecodeStep.drawn`; valid once `is_done()`.
        logits: float32 `[S, V]` on the host, or None if no sequence needs them; valid once `is_done()`.
        errors: of slots whose attention failed; only an eager step has any.
    """

    def __init__(
        self,
        drawn: Tensor,
        logits: Tensor | None,
        is_done: Callable[[], bool],
        *,
        path: StepPath,
        errors: dict[int, Exception],
    ) -> None:
        self._drawn = drawn
        self._logits = logits
        self._is_done = is_done
        self.path = path
        self.errors = errors

    def wait(self, timeout_s: float) -> None:
        """Wait until the device has finished the step. Raises: KvferryError: timeout_s has passed."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_done():
            if time.monotonic() > deadline_s:
                raise KvferryError(f"a decode step took more than {timeout_s} s", reason="step_timeout")
            time.sleep(_POLL_S)

    def drawn(self) -> list[tuple[int, bool, bool]]:
        """For each slot: the token, whether one could be drawn, whether it was active. Call after `wait`."""
        return [(token, bool(ok), bool(active)) for token, ok, active in self._drawn.T.tolist()]

    def logits(self, slot: int) -> Tensor | None:
        """float32 `[V]`; None if no sequence needed logits. Call after `wait`."""
        return None if self._logits is None else self._logits[slot]


class StepRunner:
    """Places batches and launches their steps, on one thread.

        place ──► launch ──► launch ──► ... ──► release | place

    Args:
        model: on the device; used by no other thread.
        warn: called with the reason if a capture fails.
    """

    def __init__(self, model: LanguageModel, device: StepDevice, *, warn: Callable[[str], None]) -> None:
        self._model = model
        self._device = device
        self._warn = warn
        self._steps: OrderedDict[StepShape, _ShapedStep] = OrderedDict()
        self._step: _ShapedStep | None = None
        self._wants_logits = False

    @property
    def runs_ahead(self) -> bool:
        """Whether the batch's next step may be launched before this one's tokens are read."""
        return self._step is not None and self._step.is_captured

    def place(
        self,
        caches: Sequence[tuple[LayerCache, ...]],
        num_appended: Sequence[int],
        inputs: Sequence[StepInput],
    ) -> None:
        """Set the batch. Args: one entry per sequence each. No step may be in flight."""
        self.release()
        with self._device.scope():
            self._device.follow()
            # Rounded up, one graph serves batches of many sizes; without graphs, empty slots only cost time.
            num_slots = in_buckets(len(caches)) if self._device.captures else len(caches)
            members = Members.of(self._model.spec, caches, num_appended, num_slots=num_slots)
            shape = StepShape.of(members, inputs)
            if shape not in self._steps:
                self._steps[shape] = _ShapedStep(self._model, members, shape, self._device, self._warn)
                if len(self._steps) > MAX_SHAPES:
                    self._steps.popitem(last=False)
            self._steps.move_to_end(shape)
            self._step = self._steps[shape]
            self._step.place(members, inputs)
        self._wants_logits = any(given.sampler.params.logprobs is not None for given in inputs)

    def release(self) -> None:
        """Drop all references to the batch. No step may be in flight."""
        if self._step is not None:
            self._step.step.attention.release()
            self._step = None

    def launch(self) -> Flight:
        """Launch a step: one token for every sequence of the batch that has not ended."""
        assert self._step is not None, "no batch has been placed"
        step = self._step.step
        with self._device.scope():
            self._step.run()
            wanted = (step.drawn, step.logits) if self._wants_logits else (step.drawn,)
            (drawn, *logits), is_done = self._device.fetch(wanted)
        return Flight(
            drawn,
            logits[0] if logits else None,
            is_done,
            path=self._step.path,
            errors=dict(step.attention.errors),
        )


class _ShapedStep:
    """A step of one shape, with its graph if it could be captured."""

    def __init__(
        self,
        model: LanguageModel,
        members: Members,
        shape: StepShape,
        device: StepDevice,
        warn: Callable[[str], None],
    ) -> None:
        self.step = DecodeStep(model, members, shape)
        self._replay: Callable[[], None] | None = None
        self._calls: dict[tuple[str, dispatch.KernelPath], int] = {}
        self._unbatched_names: tuple[str, ...] = ()
        self._because = "" if device.captures else "cpu"
        if device.captures and self.step.is_launched:
            self._capture(device, warn)

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    @property
    def path(self) -> StepPath:
        if self._replay is not None:
            return StepPath(name="graph")
        return StepPath(name="eager", because=",".join(self._unbatched_names) or self._because or "torch")

    def place(self, members: Members, inputs: Sequence[StepInput]) -> None:
        self._unbatched_names = members.unbatched_names
        self.step.place(members, inputs)

    def run(self) -> None:
        self.step.prepare()
        if self._replay is None:
            self.step.run()
            return
        self._replay()
        dispatch.count(self._calls)

    def _capture(self, device: StepDevice, warn: Callable[[str], None]) -> None:
        """Capture the step. All slots are empty at this time, so the runs that this takes write no KV."""
        try:
            replay = device.capture(self._run_recorded)
        except RuntimeError as error:
            warn(str(error))
            self._because = "capture_failed"
            return
        self._replay = replay

    def _run_recorded(self) -> None:
        with dispatch.recording() as calls:
            self.step.run()
        self._calls = dict(calls)
