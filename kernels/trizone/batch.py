"""Mixed-bit decode attention of a batch: packed prompts of ragged heads and their new rows, in two launches
per layer (prologue and append, attend), or one call of C code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import BatchShape, CachedRows, NewToken, NewTokens, SlotBatch, in_buckets
from kvferry.kernels.descriptors import ROW_FIELDS, programs_at_once
from kvferry.kernels.dispatch import alignment_problem
from kvferry.kernels.native.library import has_halves
from kvferry.kernels.packed.layer import ENTRY_FIELDS, PackedLayer, packed_entries
from kvferry.kernels.softmax import plain
from kvferry.kernels.trizone.torch_path import trizone_decode_segments
from kvferry.kernels.trizone.work_list import (
    FIRST_ITEM_COLUMN,
    HEAD_COLUMN,
    ITEM_FIELDS,
    KIND_IDLE,
    SOURCE_COLUMN,
    WorkList,
    work_list,
)

if TYPE_CHECKING:
    from kvferry.kernels.trizone.triton_kernel import TriZoneScratch

ROWS_PER_SPLIT = 1024
"""New rows that one program attends to at most, up to `MAX_ROW_SPLITS` programs."""
MAX_ROW_SPLITS = 8
FEW_SLOTS, MANY_SLOTS = 4, 8
"""A sequence is divided into items twice, for batches of at most the first number of slots and for larger
ones. The items of as many slots run at once. A few more than that would take as long as twice as many."""
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

    A slot has H_kv entries and a fixed number of items in each of every layer's two work lists; unused items
    are idle. If a sequence needs more items than that, all slots get more.

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
        if self.has_tables:
            size = (shape.num_layers, shape.num_heads, ENTRY_FIELDS)
            self._entries = torch.zeros(size, dtype=torch.int64, device=shape.device)
            at_once = programs_at_once(shape.device)
            self._lists = [_Items(shape, at_once // slots) for slots in (FEW_SLOTS, MANY_SLOTS)]
            self._packed_tokens = self._entries, codes

    @classmethod
    def _fits_native(cls, shape: BatchShape) -> bool:
        return super()._fits_native(shape) and shape.head_dim % NATIVE_CHANNELS == 0 and has_halves()

    def place(self, slot: int, layers: Mapping[int, PackedRows]) -> None:
        super().place(slot, layers)
        if self._is_native and layers:
            entries = packed_entries([rows.packed for rows in layers.values()], self._codes)
            self._entries_of(slot)[list(layers)] = entries
        elif self._in_triton:
            self._place_work(slot, layers)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        if self.has_tables:
            self._entries_of(slot).zero_()
        if self._in_triton:
            for items in self._lists:
                items.clear(slot)

    def size(self) -> tuple[int, ...]:
        """See `SlotBatch.size`: the items of a slot, powers of two."""
        return tuple([items.number for items in self._lists])

    def scratch(self, num_slots: int) -> PackedScratch:
        if self._is_native:
            return PackedScratch()
        # a CPU install has no Triton
        from kvferry.kernels.trizone.triton_kernel import TriZoneScratch

        shape, lists = self._shape.of_slots(num_slots), self._lists[num_slots > FEW_SLOTS]
        works = tuple(
            WorkList(
                entries=self._entries[layer, : shape.num_heads],
                items=lists.table[layer, : num_slots * lists.number],
            )
            for layer in range(shape.num_layers)
        )
        launches = TriZoneScratch.of(self._output[:num_slots], shape.num_heads, num_slots * lists.number)
        return PackedScratch(works=works, launches=launches)

    def _place_work(self, slot: int, layers: Mapping[int, PackedRows]) -> None:
        """Write a slot's entries and items."""
        if not layers:
            return
        heads = self._shape.num_kv_heads
        capacity = max(rows.keys.shape[1] for rows in layers.values())
        row_splits = min(max(-(-capacity // ROWS_PER_SPLIT), 1), MAX_ROW_SPLITS)
        packed = [[rows.packed] for rows in layers.values()]
        numbers = torch.tensor(list(layers)).to(self._shape.device)
        # the divisions are made in one list, one after the other
        wanted = [max(items.wanted - heads * row_splits, heads) for items in self._lists]
        work = work_list(
            packed * len(wanted),
            self._codes,
            row_splits=row_splits,
            num_programs=[number for number in wanted for _ in packed],
        )
        division, first = work.items[:, HEAD_COLUMN] // (len(packed) * heads), 0
        for number, items in enumerate(self._lists):
            own = work.items[division == number]
            own[:, [SOURCE_COLUMN, HEAD_COLUMN]] -= number * len(packed) * heads
            own[:, FIRST_ITEM_COLUMN] -= first
            items.place(slot, numbers, own)
            first += len(own)
        entries = work.entries[: len(packed) * heads].view(len(packed), heads, -1)
        entries[:, :, 0] = slot * heads + torch.arange(heads)
        self._entries_of(slot).index_copy_(0, numbers, entries.to(self._shape.device, non_blocking=True))

    def _entries_of(self, slot: int) -> Tensor:
        heads = self._shape.num_kv_heads
        return self._entries[:, slot * heads : (slot + 1) * heads]

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


class _Items:
    """Items of every layer's work list, as many for each slot, the others idle.

    Attributes:
        table: int32 `[layers, slots * number, ITEM_FIELDS]`, on the device.
        number: of a slot, a power of two, or 0 before the first sequence.
        wanted: of a slot; a long sequence may need more.
    """

    def __init__(self, shape: BatchShape, wanted: int) -> None:
        self._shape = shape
        self.wanted = 1 << max(wanted.bit_length() - 1, 0)
        self.number = 0
        self.table = torch.zeros(shape.num_layers, 0, ITEM_FIELDS, dtype=torch.int32)

    def place(self, slot: int, numbers: Tensor, items: Tensor) -> None:
        """Write a slot's items.

        Args: numbers: of its layers, int64 on the device; items: of a work list that treats the layers as
            sequences.
        """
        heads, num_layers = self._shape.num_kv_heads, len(numbers)
        of_layer = items[:, HEAD_COLUMN].long() // heads
        counts = torch.bincount(of_layer, minlength=num_layers)
        first = counts.cumsum(0) - counts
        self._give(int(counts.max()))
        shift = (slot * heads - of_layer * heads).int()
        items[:, SOURCE_COLUMN] += shift
        items[:, HEAD_COLUMN] += shift
        items[:, FIRST_ITEM_COLUMN] += (slot * self.number - first[of_layer]).int()
        padded = _IDLE.repeat(num_layers, self.number, 1)
        padded[of_layer, torch.arange(len(items)) - first[of_layer]] = items
        self._of_slot(slot).index_copy_(0, numbers, padded.to(self._shape.device, non_blocking=True))

    def clear(self, slot: int) -> None:
        self._of_slot(slot).copy_(_IDLE.expand(self.number, -1), non_blocking=True)

    def _give(self, number: int) -> None:
        """Give every slot at least this many items."""
        if number <= self.number:
            return
        shape, former, placed = self._shape, self.number, self.table
        self.number = in_buckets(number)
        self.table = _IDLE.to(shape.device).repeat(shape.num_layers, shape.num_slots * self.number, 1)
        if former:
            slots = torch.arange(shape.num_slots, dtype=torch.int32, device=shape.device)
            wider = self.table.view(shape.num_layers, shape.num_slots, self.number, -1)
            wider[:, :, :former] = placed.view(shape.num_layers, shape.num_slots, former, -1)
            wider[..., FIRST_ITEM_COLUMN] += slots[:, None] * (self.number - former)

    def _of_slot(self, slot: int) -> Tensor:
        return self.table[:, slot * self.number : (slot + 1) * self.number]
