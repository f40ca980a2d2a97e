"""Attention of one decode step over sequences in the arena, each with its own format and method.

A decode step (`step.py`) passes it to the model, which calls it once per layer. In each layer, sequences of
the same kind are attended together, by one launch if a Triton kernel supports them (`kernels/*/batch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import BatchShape, CachedRows, SlotBatch
from kvferry.kernels.dense_decode.batch import DenseBatch
from kvferry.kernels.hsa.batch import HsaBatch, SparseRows, SparseSize
from kvferry.kernels.trizone.batch import PackedRows, PackedSize, TriZoneBatch, packed_work
from kvferry.kernels.trizone.work_list import WorkList
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.model.spec import TORCH_DTYPES, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Members:
    """A batch's slots grouped by attention kernel, for each layer; `unbatched` slots run one at a time.

    Attributes:
        num_appended: for each sequence, rows appended before the first step.
        base: the whole arena as a one-dimensional tensor of the model's dtype; codes: the same memory as
            uint8.
        dense, sparse, packed, unbatched: for each layer, its slots with their rows or cache.
    """

    shape: BatchShape
    num_appended: tuple[int, ...]
    base: Tensor
    codes: Tensor
    dense: Sequence[Mapping[int, CachedRows]]
    sparse: Sequence[Mapping[int, SparseRows]]
    packed: Sequence[Mapping[int, PackedRows]]
    unbatched: Sequence[Mapping[int, LayerCache]]

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        caches: Sequence[tuple[LayerCache, ...]],
        num_appended: Sequence[int],
        *,
        num_slots: int,
    ) -> Members:
        """Args: caches, num_appended: one entry per sequence. Sequences take the first slots."""
        layers_of = range(spec.num_layers)
        dense: list[dict[int, CachedRows]] = [{} for _ in layers_of]
        sparse: list[dict[int, SparseRows]] = [{} for _ in layers_of]
        packed: list[dict[int, PackedRows]] = [{} for _ in layers_of]
        unbatched: list[dict[int, LayerCache]] = [{} for _ in layers_of]
        for slot, (layers, count) in enumerate(zip(caches, num_appended, strict=True)):
            for layer, cache in enumerate(layers):
                match cache.batched(count):
                    case SparseRows() as rows:
                        sparse[layer][slot] = rows
                    case PackedRows() as rows:
                        packed[layer][slot] = rows
                    case CachedRows() as rows:
                        dense[layer][slot] = rows
                    case None:
                        unbatched[layer][slot] = cache
        arena = next(iter(caches[0][0].regions.values()))
        return cls(
            shape=_shape(spec, arena.device, num_slots),
            num_appended=tuple(num_appended),
            base=_whole(arena, TORCH_DTYPES[spec.dtype]),
            codes=_whole(arena, torch.uint8),
            dense=dense,
            sparse=sparse,
            packed=packed,
            unbatched=unbatched,
        )

    @property
    def unbatched_names(self) -> tuple[str, ...]:
        """Names of the formats and attentions that no batched kernel supports, sorted."""
        return tuple(sorted({cache.name for layer in self.unbatched for cache in layer.values()}))

    @cached_property
    def works(self) -> tuple[WorkList, ...]:
        """Work lists of the packed kernel; empty if no kernel serves the packed layers."""
        if not any(self.packed) or not TriZoneBatch.is_launchable(self.shape):
            return ()
        return packed_work(self.shape, self.codes, self.packed)

    @property
    def packed_size(self) -> PackedSize | None:
        return PackedSize.of(self.works) if self.works else None

    @property
    def sparse_size(self) -> SparseSize:
        return SparseSize.of(self.sparse)

    @cached_property
    def signature(self) -> Hashable:
        """Equal for batches whose steps make the same launches, so that they can share memory and a graph."""
        return (
            self.base.data_ptr(),
            self.shape.num_slots,
            tuple(bool(layer) for layer in self.dense),
            tuple(bool(layer) for layer in self.sparse),
            self.sparse_size if any(self.sparse) else None,
            tuple(bool(layer) for layer in self.packed),
            self.packed_size,
            any(self.unbatched),
        )


def _shape(spec: ModelSpec, device: torch.device, num_slots: int) -> BatchShape:
    return BatchShape(
        num_layers=spec.num_layers,
        num_slots=num_slots,
        num_kv_heads=spec.num_kv_heads,
        group_size=spec.group_size,
        head_dim=spec.head_dim,
        dtype=TORCH_DTYPES[spec.dtype],
        device=device,
    )


def _whole(view: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole storage behind a view, as a one-dimensional tensor."""
    return torch.empty(0, dtype=dtype, device=view.device).set_(view.untyped_storage())


class BatchAttention:
    """Implements `DecodeAttention` for a batch: one slot per sequence, then empty slots.

    An error in one sequence does not affect the others. It is recorded in `errors`, and that sequence's
    output is zero from then on.

        created, slots empty ──place──► every layer once ──advance──► every layer once ...

    Args: members: any batch with the signature of those that will be placed.
    """

    def __init__(self, members: Members) -> None:
        shape, base = members.shape, members.base
        self.errors: dict[int, Exception] = {}
        self._num_steps = 0
        self._num_appended: tuple[int, ...] = ()
        self._unbatched: Sequence[Mapping[int, LayerCache]] = [{}] * shape.num_layers
        self._has_unbatched = any(members.unbatched)
        self._dense = DenseBatch(shape, base) if any(members.dense) else None
        self._sparse = HsaBatch(shape, base, members.sparse_size) if any(members.sparse) else None
        self._packed = (
            TriZoneBatch(shape, base, members.codes, members.packed_size) if any(members.packed) else None
        )
        kinds: list[tuple[SlotBatch[Any] | None, Sequence[Mapping[int, CachedRows]]]] = [
            (self._dense, members.dense),
            (self._sparse, members.sparse),
            (self._packed, members.packed),
        ]
        self._batches = [(batch, tuple(map(bool, layers))) for batch, layers in kinds if batch is not None]

    @classmethod
    def of(
        cls, spec: ModelSpec, caches: Sequence[tuple[LayerCache, ...]], num_appended: Sequence[int]
    ) -> BatchAttention:
        """Create the attention of a batch and place the batch.

        Args: caches: for each sequence, its layers; num_appended: rows it has appended before the first step.
        """
        members = Members.of(spec, caches, num_appended, num_slots=len(caches))
        attention = cls(members)
        attention.place(members)
        return attention

    def place(self, members: Members) -> None:
        """Set the batch before its first step."""
        self.errors = {}
        self._num_steps = 0
        self._num_appended = members.num_appended
        self._unbatched = members.unbatched
        if self._dense is not None:
            self._dense.fill(members.dense)
        if self._sparse is not None:
            self._sparse.fill(members.sparse)
        if self._packed is not None:
            self._packed.fill(members.packed)
            if self._packed.is_launched:
                self._packed.take_up(members.works)

    def release(self) -> None:
        """Drop all references to the batch."""
        self._unbatched = [{}] * len(self._unbatched)
        for batch, _ in self._batches:
            batch.release()

    @property
    def is_launched(self) -> bool:
        """Whether batched kernels run all of the attention, so that a step does not wait for the device."""
        return not self._has_unbatched and all(batch.is_launched for batch, _ in self._batches)

    def advance(self, active: Tensor) -> None:
        """Move on to the next step. Args: active: int64 `[S]`, 1 for slots that continue, else 0."""
        self._num_steps += 1
        for batch, _ in self._batches:
            batch.advance(active)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See `DecodeAttention.__call__`."""
        outputs = [
            batch.attend(layer, queries, keys, values, scaling=scaling, alone=self._run_alone)
            for batch, layers in self._batches
            if layers[layer]
        ]
        if self._unbatched[layer] or not outputs:
            outputs.append(self._attend_unbatched(layer, queries, keys, values, scaling))
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs).sum(0)

    def _attend_unbatched(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        output = torch.zeros_like(queries)
        for slot, cache in self._unbatched[layer].items():
            attend = partial(
                cache.append_and_attend,
                queries[slot],
                keys[slot],
                values[slot],
                num_appended=self._num_appended[slot] + self._num_steps,
                scaling=scaling,
            )
            attended = self._run_alone(slot, attend)
            if attended is not None:
                output[slot] = attended
        return output

    def _run_alone(self, slot: int, attend: Callable[[], Tensor]) -> Tensor | None:
        """See `kernels.decode_batch.Alone`."""
        if slot in self.errors:
            return None
        try:
            return attend()
        except Exception as error:  # an error of one sequence must not fail the batch
            self.errors[slot] = error
            return None
