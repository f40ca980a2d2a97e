"""Attention and states of decode steps over sequences in the arena, each with its own format and method.

A decode step (`step.py`) passes it to the model, which calls it once per layer. In each layer, sequences of
the same kind are attended together, by one launch if a Triton kernel supports them (`kernels/*/batch.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import BatchShape, CachedRows, NewTokens, SlotBatch, WindowRows
from kvferry.kernels.dense_decode.batch import DenseBatch, WindowBatch
from kvferry.kernels.hsa.batch import HsaBatch, SparseRows
from kvferry.kernels.kivi.batch import KiviBatch, QuantisedRows
from kvferry.kernels.packed_hsa.batch import PackedHsaBatch, SparsePackedRows
from kvferry.kernels.softmax import Scaling
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch
from kvferry.shared.compression.formats.interface import LayerCache, Tensors
from kvferry.shared.compression.formats.state import State, StateLayer, stacked, unstack
from kvferry.shared.model.spec import TORCH_DTYPES, Heads, ModelSpec


class Kernel(NamedTuple):
    """A batched kernel. Attributes: reads_codes: bytes of the arena, too, beside rows."""

    make: Callable[..., SlotBatch[Any, Any]]
    op: str
    reads_codes: bool = False


KERNELS: Mapping[type[CachedRows], Kernel] = {
    CachedRows: Kernel(DenseBatch, "dense_decode"),
    WindowRows: Kernel(WindowBatch, "dense_decode"),
    SparseRows: Kernel(HsaBatch, "hsa"),
    PackedRows: Kernel(TriZoneBatch, "trizone", reads_codes=True),
    SparsePackedRows: Kernel(PackedHsaBatch, "packed_hsa", reads_codes=True),
    QuantisedRows: Kernel(KiviBatch, "kivi", reads_codes=True),
}
_Kind = tuple[Heads, type[CachedRows]]
"""What one batched kernel runs: layers with equal heads and rows of one kind."""


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A placed sequence: its layers for each of its kernels, those that run alone, and those with a state."""

    placed_at: int
    num_appended: int
    batched: Mapping[_Kind, frozenset[int]]
    unbatched: Mapping[int, LayerCache]
    states: Mapping[int, Tensors]


class SlotAttention:
    """The slots' sequences, grouped by attention kernel in each layer; `unbatched` layers run one at a time.

    Slots are placed and removed one at a time, between steps; the others stay as they are. An error in one
    sequence does not affect the others. It is recorded in `errors` until its slot is removed, and that
    sequence's output is zero from then on.

    Args:
        num_slots: the most.
        arena: any part of the memory that all sequences are in.

    Attributes: num_steps: finished steps, as the host has counted them.
    """

    def __init__(self, spec: ModelSpec, num_slots: int, arena: Tensor) -> None:
        self._heads = [spec.heads(layer) for layer in range(spec.num_layers)]
        self._kinds: list[_Kind] = list(itertools.product(dict.fromkeys(self._heads), KERNELS))
        self._num_slots = num_slots
        self._base = _whole(arena, TORCH_DTYPES[spec.dtype])
        self._codes = _whole(arena, torch.uint8)
        self._batches: dict[_Kind, SlotBatch[Any, Any]] = {}
        self._members: dict[int, _Member] = {}
        self.num_steps = 0
        self.errors: dict[int, Exception] = {}

    def place(self, slot: int, caches: Sequence[LayerCache], num_appended: int) -> None:
        """Place a sequence in an empty slot. Args: num_appended: rows it has appended so far."""
        batched: dict[_Kind, dict[int, CachedRows]] = {}
        unbatched, states = {}, {}
        for layer, cache in enumerate(caches):
            if isinstance(cache, StateLayer):
                states[layer] = cache.regions
                continue
            rows = cache.batched(num_appended)
            if rows is None:
                unbatched[layer] = cache
            else:
                batched.setdefault((self._heads[layer], type(rows)), {})[layer] = rows
        for kind, layers in batched.items():
            self._batch(kind).place(slot, layers)
        self._members[slot] = _Member(
            placed_at=self.num_steps,
            num_appended=num_appended,
            batched={kind: frozenset(layers) for kind, layers in batched.items()},
            unbatched=unbatched,
            states=states,
        )

    def remove(self, slot: int) -> None:
        """Empty a slot, and drop all references to its sequence."""
        member = self._members.pop(slot)
        self.errors.pop(slot, None)
        for kind in member.batched:
            self._batches[kind].remove(slot)

    @property
    def unbatched_names(self) -> tuple[str, ...]:
        """Names of the formats and attentions that no batched kernel supports, sorted."""
        members = self._members.values()
        names = {cache.name for member in members for cache in member.unbatched.values()}
        for member in members:
            if member.states:
                names.add(State.name)
        return tuple(sorted(names))

    @property
    def has_unbatched_rows(self) -> bool:
        """True if rows of a layer are attended without a batched kernel."""
        return any(member.unbatched for member in self._members.values())

    def signature(self) -> Hashable:
        """Return a key equal for batches of the same launches, which can share memory and a graph."""
        launches = tuple(
            (batch.op, layers, batch.is_launched, batch.size() if batch.is_launched else None)
            for batch, layers in self.batches()
        )
        return launches, any(member.unbatched or member.states for member in self._members.values())

    def batches(self) -> list[tuple[SlotBatch[Any, Any], frozenset[int]]]:
        """Return the batched kernels in use, each with the layers in which it has members."""
        found = []
        for kind in self._kinds:
            every = {member.batched[kind] for member in self._members.values() if kind in member.batched}
            if every:
                found.append((self._batches[kind], frozenset().union(*every)))
        return found

    def states(self, layer: int) -> dict[int, Tensors]:
        """Return the layer's states in the arena, by slot."""
        return {slot: member.states[layer] for slot, member in self._members.items()}

    def attend_unbatched(self, layer: int, step: NewTokens) -> Tensor | None:
        """Attend for the slots without a kernel in this layer. Returns: `[S, H_kv, G, D]`, None if none."""
        output: Tensor | None = None
        for slot, member in self._members.items():
            cache = member.unbatched.get(layer)
            if cache is None:
                continue
            output = _no_output(step.queries, step.values) if output is None else output
            if slot in self.errors:
                continue
            try:
                output[slot] = cache.append_and_attend(
                    step.queries[slot],
                    step.keys[slot],
                    step.values[slot],
                    num_appended=member.num_appended + self.num_steps - member.placed_at,
                    scaling=step.scaling,
                )
            except Exception as error:
                self.errors[slot] = error
        return output

    def _batch(self, kind: _Kind) -> SlotBatch[Any, Any]:
        if kind not in self._batches:
            heads, rows = kind
            shape = BatchShape(
                num_layers=len(self._heads),
                num_slots=self._num_slots,
                num_kv_heads=heads.num_kv_heads,
                group_size=heads.group_size,
                head_dim=heads.head_dim,
                dtype=self._base.dtype,
                device=self._base.device,
            )
            kernel = KERNELS[rows]
            memory = (self._base, self._codes) if kernel.reads_codes else (self._base,)
            self._batches[kind] = kernel.make(shape, *memory)
        return self._batches[kind]


def _whole(view: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole storage behind a view, as a one-dimensional tensor."""
    return torch.empty(0, dtype=dtype, device=view.device).set_(view.untyped_storage())


def _no_output(queries: Tensor, values: Tensor) -> Tensor:
    """Return zeros `[S, H_kv, G, D]` with as many channels as the values have."""
    return queries.new_zeros((*queries.shape[:3], values.shape[2]))


class BatchAttention:
    """Implements `DecodeAttention` and `LayerStates` for steps over the first slots, while the slots'
    signature is the same.

        every layer once ──advance──► every layer once ...

    Attributes:
        rows_are_launched: whether batched kernels attend to all rows.
        is_launched: whether there are no states beside them either, so that a step does not wait for the
            device.
    """

    def __init__(self, slots: SlotAttention, num_slots: int) -> None:
        self._slots = slots
        self._num_slots = num_slots
        self._batches = [
            (batch, layers, batch.scratch(num_slots) if batch.is_launched else None)
            for batch, layers in slots.batches()
        ]
        self._has_unbatched = bool(slots.unbatched_names)
        self._has_unbatched_rows = slots.has_unbatched_rows

    @property
    def rows_are_launched(self) -> bool:
        return not self._has_unbatched_rows and all(batch.is_launched for batch, _, _ in self._batches)

    @property
    def is_launched(self) -> bool:
        return not self._has_unbatched and self.rows_are_launched

    @property
    def num_steps(self) -> int:
        """The number of steps that the host has counted; see `count_steps`."""
        return self._slots.num_steps

    def count_steps(self, number: int) -> None:
        self._slots.num_steps += number
        for batch, _, _ in self._batches:
            batch.count_steps(number)

    def advance(self, active: Tensor) -> None:
        """Move on to the next step. Args: active: int64 `[S]`, 1 for slots that continue, else 0."""
        self._slots.num_steps += 1
        for batch, _, _ in self._batches:
            batch.advance(active)

    def show(self, active: Tensor) -> None:
        """Change which slots the next step is for. Args: as in `advance`."""
        for batch, _, _ in self._batches:
            batch.show(active)

    def load(self, layer: int) -> dict[str, Tensor]:
        return stacked(self._slots.states(layer), self._num_slots)

    def store(self, layer: int, state: Tensors) -> None:
        unstack(state, self._slots.states(layer))

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
        slots, step = self._slots, NewTokens(queries, keys, values, scaling)
        outputs: list[Tensor] = []
        for batch, layers, scratch in self._batches:
            if layer in layers:
                outputs.append(batch.attend(layer, step, errors=slots.errors, scratch=scratch))
        unbatched = slots.attend_unbatched(layer, step) if self._has_unbatched else None
        if unbatched is not None:
            outputs.append(unbatched)
        if not outputs:
            return _no_output(queries, values)
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs).sum(0)
