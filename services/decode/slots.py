"""The slots of a batch: sequences are placed in them, and steps run over them.

`batch.py` says which sequences; `step.py` is one step. Needs torch alone, because benchmarks of GPUs run it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from torch import Tensor

from kvferry.kernels.decode_batch import in_buckets
from kvferry.kernels.quarantine import quarantined
from kvferry.services.decode.attention import BatchAttention
from kvferry.services.decode.step import BatchSlots, DecodeStep, LaunchedStep, StepInput
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.device.step_device import StepDevice
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec

MAX_STEPS = 256
"""Limit on cached steps, each with one graph at most. A graph has about 450 kernels, for each of which the
driver takes about 10 KB beside torch's allocator (NVIDIA says so of CUDA 12; not measured here): 1.2 GB for
all. The default warm-up captures 96, so load has room for 26 mixes of methods at six batch sizes. Scratch
memory is small beside the KV of the sequences that it is for, and goes with the last step that uses it."""


@dataclass(kw_only=True)
class Captures:
    """The graphs that have been captured: how many, and the seconds that it took."""

    number: int = 0
    seconds: float = 0.0


class StepRunner:
    """Places sequences in slots and launches steps over them, on one thread.

        join, leave ──► launch ──► launch ──► join, leave ──► launch ──► ...

    A slot stays as it is while others are placed and removed, also while a step is in flight: what is written
    comes after that step.

    Args:
        model: on the device; used by no other thread.
        max_batch_size: sequences that may be placed at the same time.
        warn: called with the reason if a capture fails.
        spec: of the heads that are attended here, if these are not all.
        captures: counts them; several runners may share it.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: StepDevice,
        *,
        max_batch_size: int,
        warn: Callable[[str], None],
        spec: ModelSpec | None = None,
        captures: Captures | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._max_batch_size = max_batch_size
        self._warn = warn
        self.captures = captures or Captures()
        self._steps: OrderedDict[tuple[Hashable, Hashable], DecodeStep] = OrderedDict()
        self._spec = spec or model.spec
        self._slots: BatchSlots | None = None
        self._step: DecodeStep | None = None
        self._num_quarantined = 0

    @property
    def num_sequences(self) -> int:
        return self._slots.num_sequences if self._slots is not None else 0

    @property
    def runs_ahead(self) -> bool:
        """True if the batch's next step may be launched before this one's tokens are read."""
        if self._step is None or self._slots is None:
            return False
        return self._step.is_captured and not self._slots.sampler.needs_tokens

    @property
    def rows_are_launched(self) -> bool:
        """True if batched kernels attend to all rows in the last step; not known after a join or leave."""
        return self._step is not None and self._step.attention.rows_are_launched

    @property
    def spare_slot(self) -> int | None:
        """A slot whose sequence should leave and join again, so that the step has fewer slots."""
        slots = self._slots
        if slots is None or slots.num_slots <= self._num_slots(slots.num_sequences):
            return None
        return slots.num_slots - 1

    def join(self, given: StepInput) -> int:
        """Place a sequence. Returns its slot."""
        with self._device.scope():
            self._device.follow(given.written)
            if self._slots is None:
                arena = next(region for cache in given.caches for region in cache.regions.values())
                num_slots = self._num_slots(self._max_batch_size)
                self._slots = BatchSlots(self._model, self._spec, num_slots, arena)
            slot = self._slots.free_slot()
            self._slots.place(slot, given)
        self._step = None
        return slot

    def last_logits(self, slot: int) -> Tensor:
        """Copy the last step's logits, float32 `[V]`, to the host; it must be done, none launched since."""
        assert self._slots is not None, "nothing has been placed"
        with self._device.scope():
            return self._slots.logits[slot].cpu()

    def leave(self, slot: int) -> None:
        """Remove a sequence, and drop all references to it."""
        assert self._slots is not None, "nothing has been placed"
        with self._device.scope():
            self._slots.remove(slot)
        self._step = None

    def reset(self) -> None:
        """Forget all slots and steps, whatever state a failure has left them in. No step may be in flight."""
        self._slots = self._step = None
        self._steps.clear()

    def launch(self, *, eager_steps: int = 0) -> LaunchedStep:
        """Launch a step: one token for every sequence of the batch that has not ended.

        Args: eager_steps: how often a step without a graph runs eagerly before it is captured.
        """
        assert self._slots is not None, "nothing has been placed"
        with self._device.scope():
            if self._device.captures and self._num_quarantined != len(quarantined()):
                self._num_quarantined = len(quarantined())
                self._step = None  # attention may have another signature
                for step in self._steps.values():
                    step.forget_quarantined()
            if self._step is None:
                self._step = self._find_step(self._slots)
            step, begin_s = self._step, time.monotonic()
            if step.prepare_on(self._device, eager_steps=eager_steps, warn=self._warn):
                self.captures.number += 1
                self.captures.seconds += time.monotonic() - begin_s
            step.launch()
            wanted = (step.drawn, step.logits) if self._slots.wanting_logits else (step.drawn,)
            (drawn, *logits), is_done = self._device.fetch(wanted)
        return LaunchedStep(
            host_drawn=drawn,
            host_logits=logits[0] if logits else None,
            is_done=is_done,
            path=step.path,
            errors=dict(self._slots.attention.errors),
        )

    def _find_step(self, slots: BatchSlots) -> DecodeStep:
        num_slots = self._num_slots(slots.num_slots)
        key = slots.shape(num_slots)
        if key not in self._steps:
            alike = (step.attention for (shape, _), step in self._steps.items() if shape == key[0])
            attention = next(alike, None) or BatchAttention(slots.attention, num_slots)
            self._steps[key] = DecodeStep(self._model, slots, num_slots, attention)
        self._steps.move_to_end(key)
        if len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)
        return self._steps[key]

    def _num_slots(self, num_sequences: int) -> int:
        """Round slots up for graphs, so that one serves many batch sizes; else empty slots only cost time."""
        return in_buckets(num_sequences) if self._device.captures else num_sequences


def lane_of(caches: Iterable[LayerCache], num_appended: int) -> int:
    """Return 0 for a sequence that batched kernels run whole, 1 for the others."""
    return int(any(cache.batched(num_appended) is None for cache in caches))
