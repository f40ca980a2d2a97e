"""Decode steps over buffers with constant addresses, as CUDA graphs or eagerly.

    token_ids, positions, active, left, stop_ids, descriptors ──► model ──► sampling ──► next step's values

The engine places sequences and launches steps, and may launch the next one before it reads a step's tokens.
If batched kernels run the whole step, it never waits for the device: lengths, positions, finished completions
and sampled tokens stay on it. All steps share the slots' buffers; every shape of attention (number of slots,
kernels) has its own scratch memory, and a graph for each way of sampling. The most recently used are cached.
A shape that appears under load runs eagerly first, so that no batch waits for graphs that it needs only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import in_buckets
from kvferry.kernels.dispatch import KernelUnavailable
from kvferry.kernels.quarantine import uses_quarantined
from kvferry.services.decode.attention import BatchAttention, SlotAttention
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.device.step_device import StepDevice
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.sampler import BatchSampler, SequenceSampler

EAGER_STEPS = 4
"""A step that has no graph runs eagerly so often while sequences wait to join, which will change the batch's
shape again. Four eager steps lose about as much time as a capture takes (by estimate: 20 ms each, and 80 ms),
so that whatever comes, at most about twice the least possible time is lost. If nobody waits, it runs once."""
RETRY_STEPS = 200
"""A step that could not be captured runs eagerly so often before it is tried once more."""
_MAX_CAPTURES = 2
_POLL_S = 50e-6
_NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class StepPath:
    """How a step runs.

    Attributes:
        name: "graph" or "eager".
        reason: why a step runs eagerly: the names of the formats and attentions without a batched kernel,
            else "cpu", "ranks" (the model has several), "new_shape" (it will be captured), "capture_failed",
            or "torch" if kernels are off or do not support the model; "" for a graph.
    """

    name: dispatch.StepPathName
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """State of one sequence when it is placed.

    Attributes:
        caches: its layers, which have `num_appended` rows beside the prompt's.
        token_id: the last sampled token, which runs next at `position`.
        num_left: tokens that may still be sampled, at least 1.
        stop_ids: ids that end the completion.
        written: when its layers are written; see `StepDevice.follow`.
    """

    caches: tuple[LayerCache, ...]
    num_appended: int
    token_id: int
    position: int
    num_left: int
    stop_ids: frozenset[int]
    sampler: SequenceSampler
    written: torch.cuda.Event | None = None


class BatchSlots:
    """State of a batch's slots on the device, in buffers that stay in place.

        empty ──place──► in the batch, active ──completion ended──► inactive: nothing is written for it
          ▲                    │                                        │
          └──────────────── remove ─────────────────────────────────────┘

    A step runs over the first slots. Placing or removing a sequence writes its own slot only.

    Attributes:
        numbers: int64 `[4, S]`: the last token, its position, whether the slot is active, and how many tokens
            may still be sampled.
        stop_ids: int64 `[S, n]`, filled up with -1.
        logits: float32 `[S, V]`, of the last step.
        wanting_logits: the slots whose sequences need them on the host.

    Args:
        num_slots: S.
        spec: of the heads that are attended here.
        arena: any part of the memory that all sequences are in.
    """

    def __init__(self, model: LanguageModel, spec: ModelSpec, num_slots: int, arena: Tensor) -> None:
        device = model.device
        self.attention = SlotAttention(spec, num_slots, arena)
        self.sampler = BatchSampler(num_slots, spec.vocab_size, device)
        self.numbers = torch.zeros(4, num_slots, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((num_slots, 1), _NO_TOKEN, device=device)
        self.logits = torch.zeros(num_slots, spec.vocab_size, device=device)
        self.wanting_logits: set[int] = set()
        self._inputs: dict[int, StepInput] = {}

    @property
    def num_slots(self) -> int:
        """The slots up to the last that has a sequence."""
        return max(self._inputs, default=-1) + 1

    @property
    def num_sequences(self) -> int:
        return len(self._inputs)

    def free_slot(self) -> int:
        """Return the first empty slot."""
        return next(slot for slot in range(len(self._inputs) + 1) if slot not in self._inputs)

    def place(self, slot: int, given: StepInput) -> None:
        """Place a sequence in an empty slot."""
        self.attention.place(slot, given.caches, given.num_appended)
        self.sampler.place(slot, given.sampler)
        numbers = torch.tensor([given.token_id, given.position, 1, given.num_left])
        self.numbers[:, slot].copy_(numbers, non_blocking=True)
        width = self.stop_ids.shape[1]
        if len(given.stop_ids) > width:
            more = (0, in_buckets(len(given.stop_ids)) - width)
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, more, value=_NO_TOKEN)
        stop_ids = torch.full(self.stop_ids.shape[1:], _NO_TOKEN)
        stop_ids[: len(given.stop_ids)] = torch.tensor(sorted(given.stop_ids))
        self.stop_ids[slot].copy_(stop_ids, non_blocking=True)
        if given.sampler.params.logprobs is not None:
            self.wanting_logits.add(slot)
        self._inputs[slot] = given

    def remove(self, slot: int) -> None:
        del self._inputs[slot]
        self.wanting_logits.discard(slot)
        self.attention.remove(slot)
        self.sampler.remove(slot)
        self.numbers[:, slot].zero_()

    def shape(self, num_slots: int) -> tuple[Hashable, Hashable]:
        """Return what a step over the first slots is made for: its attention, and its sampling. Steps share a
        `DecodeStep` and its graph if both are equal, and their attention's scratch memory if the first is."""
        return (num_slots, self.attention.signature()), (self.sampler.flavour, self.stop_ids.shape[1])


class DecodeStep:
    """A step over the first slots of a batch, for one shape of it.

    Attributes:
        drawn: int64 `[3, S]`, of the last step: the token, whether one could be drawn from the logits, and
            whether the slot was active.
        logits: float32 `[S, V]` of the last step.
    """

    def __init__(
        self, model: LanguageModel, slots: BatchSlots, num_slots: int, attention: BatchAttention
    ) -> None:
        self._model = model
        self._slots = slots
        self.attention = attention
        self._flavour = slots.sampler.flavour
        self._token_ids, self._positions, self._active, self._left = slots.numbers[:, :num_slots].unbind(0)
        self._stop_ids = slots.stop_ids[:num_slots]
        self.drawn = torch.zeros(3, num_slots, dtype=torch.int64, device=model.device)
        self.logits = slots.logits[:num_slots]
        self._replay: Callable[[], None] | None = None
        self._calls: dict[tuple[str, dispatch.KernelPath], int] = {}
        self._eager_reason = "torch"
        self._num_eager = 0
        self._num_failed = 0

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    @property
    def path(self) -> StepPath:
        if self._replay is not None:
            return StepPath(name="graph")
        unbatched = self._slots.attention.unbatched_names
        return StepPath(name="eager", reason=",".join(unbatched) or self._eager_reason)

    def forget_quarantined(self) -> None:
        """Forget the step's graph if it has a kernel that has been quarantined since."""
        if uses_quarantined(self._calls):
            self._replay = None
            self._calls = {}

    def prepare_on(self, device: StepDevice, *, eager_steps: int, warn: Callable[[str], None]) -> bool:
        """Capture the step, before a launch, if that makes it faster and it has run eagerly often enough.

        The runs that a capture takes change no slot: all of them are inactive meanwhile. If it fails, the
        step runs eagerly `RETRY_STEPS` times, and is tried once more.

        Returns: whether it has been captured now.
        """
        if self._replay is not None:
            return False
        if not device.captures:
            self._eager_reason = "cpu" if self._model.device.type == "cpu" else "ranks"
            return False
        if not self.attention.is_launched:
            self._eager_reason = "torch"
            return False
        if self._num_failed == 0:
            self._eager_reason = "new_shape"
        least_eager = RETRY_STEPS if self._num_failed else eager_steps
        if self._num_failed == _MAX_CAPTURES or self._num_eager < least_eager:
            return False
        return self._capture_on(device, warn)

    def _capture_on(self, device: StepDevice, warn: Callable[[str], None]) -> bool:
        active, num_steps = self._active.clone(), self.attention.num_steps
        self._active.zero_()
        self.attention.show(self._active)
        capture = device.capture_warm if self._num_eager else device.capture
        try:
            self._replay = capture(self._run_recorded)
        except Exception as error:  # Triton's compiler has its own errors; the step runs without a graph
            warn(f"{type(error).__name__}: {error}")
            self._eager_reason = "capture_failed"
            self._num_failed += 1
            self._num_eager = 0
        self._active.copy_(active)
        self.attention.count_steps(num_steps - self.attention.num_steps)
        self.attention.show(self._active)
        return self._replay is not None

    def launch(self) -> None:
        """Replay the step's graph, or run it if it has none."""
        self._slots.sampler.refill()
        if self._replay is None:
            self._num_eager += 1
            self.run()
            return
        num_steps = self.attention.num_steps
        self._replay()
        self.attention.count_steps(num_steps + 1 - self.attention.num_steps)
        dispatch.count(self._calls)

    def _run_recorded(self) -> None:
        with dispatch.recording() as calls:
            self.run()
        if uses_quarantined(calls):
            raise KernelUnavailable("a kernel was quarantined while the step was captured")
        self._calls = dict(calls)

    def run(self) -> None:
        """Sample a token for every active slot into `drawn`; update the slots for the next step."""
        active = self._active
        logits = self._model.decode(
            self._token_ids, self._positions, attention=self.attention, states=self.attention
        )
        self.logits.copy_(logits)
        tokens, valid = self._slots.sampler.sample(self.logits, active, self._flavour)
        self.drawn[0].copy_(tokens)
        self.drawn[1].copy_(valid)
        self.drawn[2].copy_(active)
        stopped = (tokens[:, None] == self._stop_ids).any(1)
        self._token_ids.copy_(torch.where(active > 0, tokens, self._token_ids))
        self._positions += active
        self._left -= active
        active.mul_(valid & ~stopped & (self._left > 0))
        self.attention.advance(active)


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step that has been launched. Its results are valid after `wait`.

    Attributes:
        host_drawn: int64 `[3, S]` on the host, as `DecodeStep.drawn`.
        host_logits: float32 `[S, V]` on the host, or None if no sequence needs them.
        errors: why a slot's attention failed; only an eager step has any.
    """

    host_drawn: Tensor
    host_logits: Tensor | None
    is_done: Callable[[], bool]
    path: StepPath
    errors: dict[int, Exception]

    def drawn(self) -> dict[int, list[int]]:
        """Return by slot the token, whether one could be drawn, and whether the slot was active."""
        return dict(enumerate(self.host_drawn.T.tolist()))

    def wait(self, timeout_s: float) -> None:
        """Wait until the device has finished the step. Raises: KvferryError: timeout_s has passed."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_done():
            if time.monotonic() > deadline_s:
                raise KvferryError(f"a decode step took more than {timeout_s} s", reason="step_timeout")
            time.sleep(_POLL_S)
