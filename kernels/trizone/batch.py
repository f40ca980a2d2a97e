"""Mixed-bit decode attention of a batch: packed prompts of ragged heads and their new rows, in three launches
per layer (append, prologue, attend)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.checks import shape_problem
from kvferry.kernels.decode_batch import BatchShape, CachedRows, SlotBatch, in_buckets
from kvferry.kernels.descriptors import ROW_FIELDS
from kvferry.kernels.dispatch import planned_path
from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.split_workspace import choose_num_splits
from kvferry.kernels.trizone.torch_path import trizone_decode_segments
from kvferry.kernels.trizone.work_list import (
    ENTRY_FIELDS,
    ITEM_FIELDS,
    KIND_IDLE,
    WorkList,
    balanced_item_bytes,
    work_list,
)

ROWS_PER_SPLIT = 1024
"""New rows that one program attends to at most, up to `MAX_ROW_SPLITS` programs."""
MAX_ROW_SPLITS = 8


@dataclass(frozen=True, kw_only=True)
class PackedRows(CachedRows):
    """One sequence's packed prompt in one layer, and the rows of its new tokens."""

    packed: PackedLayer


@dataclass(frozen=True, kw_only=True)
class PackedSize:
    """Grids of a batch's launches, powers of two: entries and items of the longest layer, and of a head."""

    num_entries: int
    num_items: int
    num_items_per_head: int

    @classmethod
    def of(cls, works: Sequence[WorkList]) -> PackedSize:
        return cls(
            num_entries=in_buckets(max(work.entries.shape[0] for work in works)),
            num_items=in_buckets(max(work.items.shape[0] for work in works)),
            num_items_per_head=in_buckets(max(work.max_items_per_head for work in works)),
        )


def packed_work(
    shape: BatchShape, base: Tensor, layers: Sequence[Mapping[int, PackedRows]]
) -> tuple[WorkList, ...]:
    """Each layer's work list, on the host.

    Args: base: uint8, the buffer that offsets count from; layers: for each, its packed slots.
    """
    splits = choose_num_splits(shape.num_heads, shape.device)
    works = []
    for members in layers:
        sequences = [[members[slot].packed] if slot in members else [] for slot in range(shape.num_slots)]
        capacity = max((rows.keys.shape[1] for rows in members.values()), default=1)
        works.append(
            work_list(
                sequences,
                base,
                row_splits=min(max(-(-capacity // ROWS_PER_SPLIT), 1), MAX_ROW_SPLITS),
                item_bytes=balanced_item_bytes(sequences, shape.num_heads * splits),
                num_kv_heads=shape.num_kv_heads,
            )
        )
    return tuple(works)


class TriZoneBatch(SlotBatch[PackedRows]):
    """A `SlotBatch` by attention on packed bytes.

    Args:
        codes: the arena as uint8.
        size: of the launches; None if torch runs the op.
    """

    def __init__(self, shape: BatchShape, base: Tensor, codes: Tensor, size: PackedSize | None) -> None:
        super().__init__("trizone", shape, base, is_launched=size is not None, empty=[0] * ROW_FIELDS)
        self._codes = codes
        if size is not None:
            self._allocate(size)

    @staticmethod
    def is_launchable(shape: BatchShape) -> bool:
        """Whether a Triton kernel supports such batches."""
        problem = shape_problem(shape.dtype, shape.group_size, shape.head_dim)
        return planned_path("trizone", shape.device, problem) != "torch"

    def take_up(self, works: Sequence[WorkList]) -> None:
        """Needed besides `fill` if kernels run the op. Args: works: `packed_work` of the batch."""
        self._entries.zero_()
        self._items.copy_(self._idle)
        for layer, work in enumerate(works):
            self._entries[layer, : work.entries.shape[0]].copy_(work.entries, non_blocking=True)
            self._items[layer, : work.items.shape[0]].copy_(work.items, non_blocking=True)

    def _attend_one(
        self,
        layer: int,
        slot: int,
        rows: PackedRows,
        queries: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
    ) -> Tensor:
        keys, values = rows.append(key, value, position=rows.length + self._num_steps - 1)
        return trizone_decode_segments(queries, (rows.packed,), keys, values, scaling=scaling)

    def _allocate(self, size: PackedSize) -> None:
        # a CPU install has no Triton
        from kvferry.kernels.split_attention import MIN_BLOCK_G
        from kvferry.kernels.trizone.scaled_queries import STATISTICS

        shape, device = self._shape, self._shape.device
        per_layer = (shape.num_layers, size.num_entries, ENTRY_FIELDS)
        self._entries = torch.zeros(per_layer, dtype=torch.int64, device=device)
        self._idle = torch.tensor([KIND_IDLE] + [0] * (ITEM_FIELDS - 1), dtype=torch.int32).to(device)
        self._items = self._idle.repeat(shape.num_layers, size.num_items, 1)
        self._works = [
            WorkList(
                entries=self._entries[layer],
                items=self._items[layer],
                num_heads=shape.num_heads,
                max_items_per_head=size.num_items_per_head,
            )
            for layer in range(shape.num_layers)
        ]
        block_d = in_buckets(shape.head_dim, least=MIN_BLOCK_G)
        per_query = (size.num_entries, MIN_BLOCK_G)
        self._scaled = torch.empty(*per_query, block_d, dtype=torch.float16, device=device)
        self._statistics = torch.empty(*per_query, STATISTICS, dtype=torch.float32, device=device)
        self._workspace = shape.workspace(size.num_items)

    def _launch(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        # a CPU install has no Triton
        from kvferry.kernels.append_rows import append_rows
        from kvferry.kernels.trizone.triton_kernel import trizone_decode_batch

        heads = self._tables.layer(layer)
        append_rows(self._base, heads, keys, values)
        trizone_decode_batch(
            queries,
            self._base,
            self._base,
            heads,
            self._codes,
            self._works[layer],
            row_stride=self._shape.head_dim,
            scaling=scaling,
            scaled=self._scaled,
            statistics=self._statistics,
            workspace=self._workspace,
            output=self._output,
        )
