"""The work list of a batch's packed attention: divided by bytes, not by heads, when sequences join the batch.

An entry is one packed head of one packed layer. An item is one program's share: some token blocks of one
entry with one V width, its last short block, or a split of a head's unpacked rows. Heads have different
numbers of tokens at different widths, so equal shares of bytes are unequal shares of tokens. A head's items,
and so their partial results, are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedHead, PackedLayer
from kvferry.kernels.packed.entries import FIELDS, packed_entry
from kvferry.kernels.packed.key_words import BLOCK_TOKENS, WIDTHS
from kvferry.kernels.packed.value_rows import value_row_bytes
from kvferry.kernels.split_workspace import MAX_SPLITS

ENTRY_FIELDS = FIELDS + 1
"""Columns of an entry: those of `packed.entries`, the output head first, and the exponent that brings the
largest value scale near 2^13."""
ITEM_FIELDS = 7
"""Columns of an item: kind, entry or head, begin, end, head, the head's first item and number of items."""
KIND_ROWS = 4
"""An item's kind: 0 to 3 for V of `WIDTHS`, or this for unpacked rows."""
KIND_TAIL = 5
"""An item's kind: the last, shorter token block of an entry, whatever the widths in it."""
KIND_IDLE = 6
"""An item's kind: padding of a fixed grid."""
SCALE_EXPONENT = 13
"""float16 represents p * s down to 2^-24; near the top of its range only negligible weights are lost."""
MIN_ITEM_BYTES = 32 << 10


@dataclass(frozen=True, kw_only=True)
class WorkList:
    """int64 `[entries, ENTRY_FIELDS]` and int32 `[items, ITEM_FIELDS]` on the device, and host-side sizes."""

    entries: Tensor
    items: Tensor
    num_heads: int
    max_items_per_head: int


def work_list(
    layers: Sequence[Sequence[PackedLayer]],
    base: Tensor,
    *,
    row_splits: int,
    item_bytes: int = MIN_ITEM_BYTES,
    num_items: int | None = None,
    num_entries: int | None = None,
    num_kv_heads: int | None = None,
) -> WorkList:
    """The list of one batch and layer.

    Args:
        layers: for each sequence, its packed layers (any number; all of H_kv heads). Where it has none, its
            heads attend to their unpacked rows, of which there may be none: their output is zero then.
        base: the tensor that offsets count from; every layer's buffer is on its device, a multiple of 16
        bytes
            from it.
        row_splits: splits of each head's unpacked rows, at least 1.
        item_bytes: bytes that one item should read.
        num_items, num_entries: pad with idle items and empty entries to these numbers, for fixed grids.
        num_kv_heads: H_kv; that of the first sequence's layers if not given.

    Raises:
        ValueError: a head has more items than `MAX_SPLITS`, or the batch more than num_items or num_entries.
    """
    entries: list[list[int]] = []
    items: list[list[int]] = []
    longest, head_base = 0, 0
    heads_each = len(layers[0][0].heads) if num_kv_heads is None else num_kv_heads
    for sequence in layers:
        for h in range(heads_each):
            own = [[KIND_ROWS, head_base + h, split, row_splits] for split in range(row_splits)]
            for layer in sequence:
                own += _zone_items(layer.heads[h], layer.layout.head_dim, len(entries), item_bytes)
                entries.append(_entry(layer, h, base, head_base + h))
            longest = max(longest, len(own))
            first_item = len(items)
            items += [[*item, head_base + h, first_item, len(own)] for item in own]
        head_base += heads_each
    if longest > MAX_SPLITS:
        raise ValueError(
            f"item_bytes is {item_bytes}; it makes {longest} items of a head, more than {MAX_SPLITS}"
        )
    items += [[KIND_IDLE] + [0] * (ITEM_FIELDS - 1)] * _missing("num_items", num_items, len(items))
    entries += [[0] * ENTRY_FIELDS] * _missing("num_entries", num_entries, len(entries))
    return WorkList(
        entries=torch.tensor(entries, dtype=torch.int64).to(base.device, non_blocking=True),
        items=torch.tensor(items, dtype=torch.int32).to(base.device, non_blocking=True),
        num_heads=head_base,
        max_items_per_head=longest,
    )


def balanced_item_bytes(layers: Sequence[Sequence[PackedLayer]], num_programs: int) -> int:
    """Item bytes for about `num_programs` items per batch and at most `MAX_SPLITS` per head."""
    codes = [head for sequence in layers for layer in sequence for head in layer.heads]
    sizes = [_head_bytes(head) for head in codes]
    return max(MIN_ITEM_BYTES, sum(sizes) // max(num_programs, 1), max(sizes, default=0) // (MAX_SPLITS // 4))


def _missing(name: str, wanted: int | None, there: int) -> int:
    """The number to pad with."""
    if wanted is not None and wanted < there:
        raise ValueError(f"{name} is {wanted}; it must be at least {there}")
    return 0 if wanted is None else wanted - there


def _head_bytes(head: PackedHead) -> int:
    parts = (head.key_words, head.values_2, head.values_4, head.values_8, head.values_16)
    return sum(part.numel() * part.element_size() for part in parts)


def _zone_items(head: PackedHead, head_dim: int, entry: int, item_bytes: int) -> list[list[int]]:
    """Runs of full token blocks with one V width (a block with two widths is in an item of each), and the
    rest."""
    items: list[list[int]] = []
    key_bytes = BLOCK_TOKENS * sum(w * c for w, c in zip(WIDTHS, head.counts.channels, strict=True)) // 8
    full, start = head.counts.num_tokens // BLOCK_TOKENS, 0
    for kind, (width, count) in enumerate(zip(WIDTHS, head.counts.tokens, strict=True)):
        if count:
            row_bytes = 2 * head_dim if width == 16 else value_row_bytes(width, head_dim)
            per_item = max(item_bytes // (key_bytes + BLOCK_TOKENS * row_bytes), 1)
            first, last = start // BLOCK_TOKENS, min(-(-(start + count) // BLOCK_TOKENS), full)
            items += [
                [kind, entry, begin, min(begin + per_item, last)] for begin in range(first, last, per_item)
            ]
        start += count
    if start % BLOCK_TOKENS:
        items.append([KIND_TAIL, entry, full, full + 1])
    return items


def _entry(layer: PackedLayer, h: int, base: Tensor, head: int) -> list[int]:
    exponent = SCALE_EXPONENT - math.frexp(layer.largest_value_scales[h])[1]
    return [*packed_entry(layer, h, base, head), min(max(exponent, -100), 100)]
