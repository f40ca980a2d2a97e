"""Mixed-bit decode attention of a batch: packed prompts of ragged heads and their new rows, in two launches
per layer (prologue and append, attend), or one call of C code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import (
    BatchShape,
    CachedRows,
    NewToken,
    NewTokens,
    SlotBatch,
    in_buckets,
)
from kvferry.kernels.descriptors import ROW_FIELDS, choose_num_splits
from kvferry.kernels.dispatch import alignment_problem
from kvferry.kernels.native.library import has_halves
from kvferry.kernels.packed.layer import ENTRY_FIELDS, PackedLayer, packed_entries
from kvferry.kernels.softmax import plain
from kvferry.kernels.trizone.torch_path import trizone_decode_segments
from kvferry.kernels.trizone.work_list import (
    FIRST_COLUMN,
    HEAD_COLUMN,
    ITEM_FIELDS,
    KIND_IDLE,
    PLACE_COLUMN,
    SOURCE_COLUMN,
    WorkList,
    work_list,
)

if TYPE_CHECKING:
    from kvferry.kernels.trizone.triton_kernel import TriZoneScratch

ROWS_PER_SPLIT = 1024
"""New rows that one program attends to at most, up to `MAX_ROW_SPLITS` programs."""
MAX_ROW_SPLITS = 8
NATIVE_CHANNELS = 32
"""C code takes a head_dim that is a multiple of this: codes of 2 bits then fill its vectors."""
_IDLE = torch.tensor([KIND_IDLE] + [0] * (ITEM_FIELDS - 1), dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class PackedRows(CachedRows):
    """One sequence's packed prompt in one layer, and the rows of its new tokens."""

    packed: PackedLayer


@dataclass(frozen=True, kw_only=True)
class PackedScratch:
    """Work lists of every layer, and what a layer's launches pass to one another; C code has neither."""

    works: tuple[WorkList, ...] = ()
    launches: TriZoneScratch | None = None


class TriZoneBatch(SlotBatch[PackedRows, PackedScratch]):
    """A `SlotBatch` by attention on packed bytes.

    A slot has H_kv entries and a fixed number of items in every layer's work list; unused items are idle. If
    a sequence needs more items than that, all slots get more.

    Args: codes: the arena as uint8; op, empty: see `SlotBatch`.
    """

    C_FUNCTION = "kvferry_attend_packed"

    def __init__(
        self,
        shape: BatchShape,
        base: Tensor,
        codes: Tensor,
        *,
        op: str = "trizone",
        empty: Sequence[int] = (0,) * ROW_FIELDS,
    ) -> None:
        super().__init__(op, shape, base, empty=empty)
        self._codes = codes
        self._num_items = 0
        if self.has_tables:
            size = (shape.num_layers, shape.num_heads, ENTRY_FIELDS)
            self._entries = torch.zeros(size, dtype=torch.int64, device=shape.device)
            self._items = torch.zeros(shape.num_layers, 0, ITEM_FIELDS, dtype=torch.int32)
            self._packed_tokens = self._entries, codes

    @classmethod
    def _fits_native(cls, shape: BatchShape) -> bool:
        return super()._fits_native(shape) and shape.head_dim % NATIVE_CHANNELS == 0 and has_halves()

    def place(self, slot: int, layers: Mapping[int, PackedRows]) -> None:
        """See `SlotBatch.place`."""
        super().place(slot, layers)
        if self._is_native and layers:
            entries = packed_entries([rows.packed for rows in layers.values()], self._codes)
            self._of_slot(self._entries, slot)[list(layers)] = entries
        elif self._in_triton:
            self._place_work(slot, layers)

    def remove(self, slot: int) -> None:
        """See `SlotBatch.remove`."""
        super().remove(slot)
        if self.has_tables:
            self._of_slot(self._entries, slot).zero_()
        if self._in_triton:
            self._of_slot(self._items, slot).copy_(_IDLE.expand(self._num_items, -1), non_blocking=True)

    def size(self) -> int:
        """See `SlotBatch.size`: the items of a slot, a power of two."""
        return self._num_items

    def scratch(self, num_slots: int) -> PackedScratch:
        """See `SlotBatch.scratch`."""
        if self._is_native:
            return PackedScratch()
        # a CPU install has no Triton
        from kvferry.kernels.trizone.triton_kernel import TriZoneScratch

        shape = self._shape.of_slots(num_slots)
        works = tuple(
            WorkList(
                entries=self._entries[layer, : shape.num_heads],
                items=self._items[layer, : num_slots * self._num_items],
                num_parts=num_slots,
            )
            for layer in range(shape.num_layers)
        )
        items = num_slots * self._num_items
        launches = TriZoneScratch.of(self._output[:num_slots], shape.num_heads, items)
        return PackedScratch(works=works, launches=launches)

    def _place_work(self, slot: int, layers: Mapping[int, PackedRows]) -> None:
        """Write a slot's entries and items."""
        if not layers:
            return
        heads, shape = self._shape.num_kv_heads, self._shape.of_slots(in_buckets(slot + 1))
        packed = [rows.packed for rows in layers.values()]
        capacity = max(rows.keys.shape[1] for rows in layers.values())
        # items are unequal, so twice as many as run at once finish sooner
        programs = 2 * heads * choose_num_splits(shape.num_heads, shape.device)
        work = work_list(
            [[layer] for layer in packed],
            self._codes,
            row_splits=min(max(-(-capacity // ROWS_PER_SPLIT), 1), MAX_ROW_SPLITS),
            num_programs=programs,
        )
        # the work list treats the sequence's layers as sequences: undo that, back to one layer each
        of_layer = work.items[:, HEAD_COLUMN].long() // heads
        num_items = torch.bincount(of_layer, minlength=len(packed))
        first = num_items.cumsum(0) - num_items
        self._give_items(int(num_items.max()))
        items, entries = work.items, work.entries.view(len(packed), heads, -1)
        shift = (slot * heads - of_layer * heads).int()
        items[:, SOURCE_COLUMN] += shift
        items[:, HEAD_COLUMN] += shift
        places = (slot * self._num_items - first[of_layer]).int()
        items[:, FIRST_COLUMN] += places
        items[:, PLACE_COLUMN] += places
        padded = _IDLE.repeat(len(packed), self._num_items, 1)
        padded[of_layer, torch.arange(len(items)) - first[of_layer]] = items
        entries[:, :, 0] = slot * heads + torch.arange(heads)
        numbers = torch.tensor(list(layers))
        for table, rows in ((self._entries, entries), (self._items, padded)):
            of_slot = self._of_slot(table, slot)
            of_slot.index_copy_(0, numbers.to(shape.device), rows.to(shape.device, non_blocking=True))

    def _give_items(self, num_items: int) -> None:
        """Give every slot at least this many items."""
        if num_items <= self._num_items:
            return
        shape, former = self._shape, self._num_items
        self._num_items = in_buckets(num_items)
        placed = self._items
        self._items = _IDLE.to(shape.device).repeat(shape.num_layers, shape.num_slots * self._num_items, 1)
        if former:
            slots = torch.arange(shape.num_slots, dtype=torch.int32, device=shape.device)
            wider = self._items.view(shape.num_layers, shape.num_slots, self._num_items, -1)
            wider[:, :, :former] = placed.view(shape.num_layers, shape.num_slots, former, -1)
            for column in (FIRST_COLUMN, PLACE_COLUMN):
                wider[..., column] += slots[:, None] * (self._num_items - former)

    def _of_slot(self, table: Tensor, slot: int) -> Tensor:
        """Return a slot's part of every layer's rows."""
        per_slot = table.shape[1] // self._shape.num_slots
        return table[:, slot * per_slot : (slot + 1) * per_slot]

    def _problem(self, rows: PackedRows) -> str | None:
        # the layout has every region at a multiple of 16 bytes from the buffer's start
        buffer = rows.packed.buffer
        return super()._problem(rows) or (alignment_problem(packed=buffer) if buffer.numel() else None)

    def _attend_one(self, layer: int, slot: int, rows: PackedRows, token: NewToken) -> Tensor:
        scaling = plain(token.scaling)
        return trizone_decode_segments(token.queries, (rows.packed,), *rows.append(token), scaling=scaling)

    def _launch(
        self, layer: int, heads: Tensor, step: NewTokens, scratch: PackedScratch, output: Tensor
    ) -> None:
        # a CPU install has no Triton
        from kvferry.kernels.trizone.triton_kernel import trizone_decode_batch

        assert scratch.launches is not None, "Triton kernels have scratch memory"
        trizone_decode_batch(
            step.queries,
            self._base,
            self._base,
            heads,
            self._codes,
            scratch.works[layer],
            row_stride=self._shape.head_dim,
            scaling=plain(step.scaling),
            scratch=scratch.launches,
            output=output,
            new_keys=step.keys,
            new_values=step.values,
        )
