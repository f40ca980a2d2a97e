"""Runs decode steps: captured where the device captures and kernels serve the batch, else eagerly, by name.

The engine places a batch and launches steps here, and reads each one's tokens from a `Flight`. A shape of
step (`StepShape`: the batch's bucket, its kinds, its sampling) has buffers and a graph of its own; the shapes
used last are kept.
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
"""Shapes whose memory and graphs are kept."""
_POLL_S = 50e-6


@dataclass(frozen=True, kw_only=True)
class StepPath:
    """How a step runs.

    Attributes:
        name: "graph" or "eager".
        because: why eagerly: the device ("cpu"), "capture_failed", "torch" where kernels are off or do not
            serve the model, or the attentions without a kernel, by name; "" for a graph.
    """

    name: dispatch.StepPathName
    because: str = ""


class Flight:
    """A step that has been launched.

    Args:
        drawn: int64 `[3, S]` on the host, as `DecodeStep.drawn`; logits: float32 `[S, V]` on the host, where
            they are wanted. Both are there once `is_done`.
        errors: of slots whose attention failed; an eager step's.
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
        """Until the device is through with it. Raises: KvferryError: it is not within timeout_s."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_done():
            if time.monotonic() > deadline_s:
                raise KvferryError(f"a decode step took more than {timeout_s} s", reason="step_timeout")
            time.sleep(_POLL_S)

    def drawn(self) -> list[tuple[int, bool, bool]]:
        """Of each slot: token, whether its logits allowed one, whether it was active. After `wait`."""
        return [(token, bool(ok), bool(active)) for token, ok, active in self._drawn.T.tolist()]

    def logits(self, slot: int) -> Tensor | None:
        """float32 `[V]`, where logits were wanted. After `wait`."""
        return None if self._logits is None else self._logits[slot]


class StepRunner:
    """One thread's steps. A batch is placed, then launched any number of times.

    Args:
        model: on the device; used by this thread alone.
        warn: told why a step that should be captured cannot be.
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
        """Take up a batch, one entry a sequence. No step is under way."""
        self.release()
        with self._device.scope():
            self._device.follow()
            # a bucket of slots serves many batches by one graph; without graphs, empty slots only cost time
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
        """Hold nothing of the batch any more. No step is under way."""
        if self._step is not None:
            self._step.step.attention.release()
            self._step = None

    def launch(self) -> Flight:
        """One more token for every sequence of the batch that has not ended."""
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
    """A step of one shape, with what repeats it where it could be captured."""

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
        """While every slot is empty, so that the step's own runs write nothing."""
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
