"""A batch's sequences sorted by what attends them in each layer, as `kernels/*/batch.py` want them.

Made by `attention.py` whenever the batch changes. Launches nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import BatchShape, CachedRows
from kvferry.kernels.hsa.batch import SparseRows, SparseSize, is_too_long
from kvferry.kernels.trizone.batch import PackedRows, PackedSize, TriZoneBatch, packed_work
from kvferry.kernels.trizone.work_list import WorkList
from kvferry.shared.cache.layout import TORCH_DTYPES, LayerCache
from kvferry.shared.compression.attention import ATTENTIONS
from kvferry.shared.compression.attention.dense import Dense
from kvferry.shared.compression.attention.hsa import Hsa
from kvferry.shared.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Members:
    """By layer and slot: who attends densely, sparsely and to packed bytes, and who is attended alone.

    Attributes:
        num_appended: of each sequence, rows appended before the first step.
        base: the arena that all of them lie in, in the model's dtype; codes: the same memory as uint8.
    """

    shape: BatchShape
    num_appended: tuple[int, ...]
    base: Tensor
    codes: Tensor
    dense: Sequence[Mapping[int, CachedRows]]
    sparse: Sequence[Mapping[int, SparseRows]]
    packed: Sequence[Mapping[int, PackedRows]]
    alone: Sequence[Mapping[int, LayerCache]]

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        caches: Sequence[tuple[LayerCache, ...]],
        num_appended: Sequence[int],
        *,
        num_slots: int,
    ) -> Members:
        """Args: caches, num_appended: one entry a sequence, which take the first slots."""
        layers_of = range(spec.num_layers)
        dense: list[dict[int, CachedRows]] = [{} for _ in layers_of]
        sparse: list[dict[int, SparseRows]] = [{} for _ in layers_of]
        packed: list[dict[int, PackedRows]] = [{} for _ in layers_of]
        alone: list[dict[int, LayerCache]] = [{} for _ in layers_of]
        for slot, (layers, count) in enumerate(zip(caches, num_appended, strict=True)):
            for layer, cache in enumerate(layers):
                match _batched(cache, count):
                    case SparseRows() as rows:
                        sparse[layer][slot] = rows
                    case PackedRows() as rows:
                        packed[layer][slot] = rows
                    case CachedRows() as rows:
                        dense[layer][slot] = rows
                    case None:
                        alone[layer][slot] = cache
        arena = caches[0][0].keys
        return cls(
            shape=_shape(spec, arena.device, num_slots),
            num_appended=tuple(num_appended),
            base=_whole(arena, TORCH_DTYPES[spec.dtype]),
            codes=_whole(arena, torch.uint8),
            dense=dense,
            sparse=sparse,
            packed=packed,
            alone=alone,
        )

    @property
    def names_alone(self) -> tuple[str, ...]:
        """What attends those that no batched attention takes, by name, sorted."""
        return tuple(sorted({_name(cache) for layer in self.alone for cache in layer.values()}))

    @cached_property
    def works(self) -> tuple[WorkList, ...]:
        """Of packed layers, where a kernel attends them; else nothing."""
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
        """Equal for batches whose steps make the same launches: the same memory and graph do for both."""
        return (
            self.base.data_ptr(),
            self.shape.num_slots,
            tuple(bool(layer) for layer in self.dense),
            tuple(bool(layer) for layer in self.sparse),
            self.sparse_size if any(self.sparse) else None,
            tuple(bool(layer) for layer in self.packed),
            self.packed_size,
            any(self.alone),
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
    """All of the memory that a view is of, one-dimensional."""
    return torch.empty(0, dtype=dtype, device=view.device).set_(view.untyped_storage())


def _batched(cache: LayerCache, num_appended: int) -> CachedRows | None:
    """A cache as the batched attention of its kind takes it; None where there is none."""
    kind, length = cache.layout.attention, cache.layout.rows + num_appended
    is_dense = type(kind) is Dense
    if cache.segments is not None or cache.stored is not None or cache.generated is not None:
        return None
    if length >= cache.keys.shape[1]:
        return None  # what has no room is refused as it is written, and alone
    if is_dense and cache.packed is not None:
        return PackedRows(keys=cache.keys, values=cache.values, length=length, packed=cache.packed)
    if is_dense:
        return CachedRows(keys=cache.keys, values=cache.values, length=length)
    if type(kind) is not Hsa or cache.packed is not None:
        return None
    page_max, page_min = kind.extremes(cache.keys, cache.auxiliary)
    rows = SparseRows(
        keys=cache.keys,
        values=cache.values,
        length=length,
        page_max=page_max,
        page_min=page_min,
        page_size=kind.page_size,
        num_channels=kind.num_channels,
        num_tokens=kind.num_tokens,
    )
    return None if is_too_long(rows) else rows


def _name(cache: LayerCache) -> str:
    """What a sequence that is attended alone is attended by."""
    name = next(name for name, kind in ATTENTIONS.items() if kind is type(cache.layout.attention))
    if cache.segments is not None:
        return "segments"
    if cache.stored is not None:
        return type(cache.stored).__name__.removesuffix("Prompt").lower()
    return f"packed_{name}" if cache.packed is not None else name
