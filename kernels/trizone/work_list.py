"""The work list of packed attention: divided by bytes, not by heads, when a sequence joins the batch.

An entry is one packed head of one packed layer. An item is one program's share: some tiles, halves of token
blocks, of one entry with one V width, or a split of a head's unpacked rows. Heads have different numbers of
tokens at different widths, so equal shares of bytes are unequal shares of tokens. A head's items, and so
their partial results, are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry.kernels.descriptors import MAX_SPLITS
from kvferry.kernels.packed.key_words import BLOCK_TOKENS, GROUP_TOKENS, WIDTHS
from kvferry.kernels.packed.layer import PackedLayer, packed_entries
from kvferry.kernels.packed.value_rows import value_row_bytes

ITEM_FIELDS = 7
"""Columns of an item: kind, entry or head, begin, end, head, the head's first item and number of items."""
_, SOURCE_COLUMN, _, _, HEAD_COLUMN, FIRST_ITEM_COLUMN, _ = range(ITEM_FIELDS)
KIND_ROWS = 4
"""An item's kind: 0 to 3 for V of `WIDTHS`, or this for unpacked rows."""
KIND_IDLE = 5
"""An item's kind: padding of a fixed grid."""
TILE_TOKENS = GROUP_TOKENS
"""A tile's tokens are in one group of K's scales."""
MIN_ITEM_BYTES = 2 << 10
MAX_ITEM_BYTES = 128 << 10
"""Limits for a sequence that is divided among a number of programs, unless a head would have too many: a long
sequence among short ones has more programs than they have."""
_BALANCING_ROUNDS = 8

_KINDS = (KIND_ROWS, 0, 1, 2, 3)
"""The kinds of an entry's items, in their order."""
_KIND_OF_COLUMN, _WIDTHS = torch.tensor(_KINDS), torch.tensor(WIDTHS)


class WorkList(NamedTuple):
    """int64 `[entries, ENTRY_FIELDS]` and int32 `[items, ITEM_FIELDS]`."""

    entries: Tensor
    items: Tensor

    def to(self, device: torch.device) -> WorkList:
        """Copy the list to a device."""
        return WorkList(*(table.to(device, non_blocking=True) for table in self))


def work_list(
    sequences: Sequence[Sequence[PackedLayer]],
    base: Tensor,
    *,
    row_splits: int,
    num_programs: int | Sequence[int] | None = None,
    item_bytes: int = MIN_ITEM_BYTES,
) -> WorkList:
    """Make the list of one layer of a batch, on the host.

    Args:
        sequences: for each, its packed layers (one at least; all of H_kv heads).
        base: the tensor that offsets count from; every layer's buffer is on its device, a multiple of 16
            bytes from it.
        row_splits: splits of each head's unpacked rows, at least 1.
        num_programs: how many items of packed tokens a sequence should have at most, for all or for each; a
            long one has more.
        item_bytes: the least bytes that an item should read.

    Raises:
        ValueError: a head has more items than `MAX_SPLITS`.
    """
    layers = [layer for sequence in sequences for layer in sequence]
    num_heads, head_dim = len(layers[0].heads), layers[0].layout.head_dim
    # a head's entries follow one another
    of_layers = torch.tensor([i for i, sequence in enumerate(sequences) for _ in sequence])
    heads, order = (of_layers[:, None] * num_heads + torch.arange(num_heads)).flatten().sort(stable=True)
    entries = packed_entries(layers, base).flatten(0, 1)[order]
    entries[:, 0] = heads
    channels, tokens = entries[:, 1:5], entries[:, 5:9]
    starts_head = torch.ones_like(heads)
    starts_head[1:] = heads[1:] != heads[:-1]
    zones, wanted = _Zones(channels, tokens, head_dim), torch.tensor(item_bytes)
    if num_programs is not None:
        wanted = _balanced(zones, heads // num_heads, torch.as_tensor(num_programs), item_bytes)
    # an item per split of the head's rows goes before those of its first entry
    splits, zero = starts_head * row_splits, torch.zeros_like(starts_head)
    rows = (splits, zero, splits, torch.ones_like(zero))
    counts, first, last, per_item = (
        torch.cat([of_rows[:, None], of_zones], 1)
        for of_rows, of_zones in zip(rows, zones.items(wanted), strict=True)
    )
    per_head = torch.zeros(int(heads[-1]) + 1, dtype=torch.int64).index_add_(0, heads, counts.sum(1))
    longest = int(per_head.max())
    if longest > MAX_SPLITS:
        raise ValueError(
            f"item_bytes is {item_bytes}; it makes {longest} items of a head, more than {MAX_SPLITS}"
        )
    flat = counts.flatten()
    group = torch.arange(len(flat)).repeat_interleave(flat)
    within = torch.arange(len(group)) - (flat.cumsum(0) - flat)[group]
    entry, kind = group // len(_KINDS), _KIND_OF_COLUMN[group % len(_KINDS)]
    begin, step, head = first.flatten()[group], per_item.flatten()[group], heads[group // len(_KINDS)]
    is_rows = kind == KIND_ROWS
    begin = begin + within * step
    end = torch.where(is_rows, row_splits, torch.minimum(begin + step, last.flatten()[group]))
    columns = (
        kind, torch.where(is_rows, head, entry), begin, end, head,
        (per_head.cumsum(0) - per_head)[head], per_head[head],
    )  # fmt: skip
    return WorkList(
        entries=entries,
        items=torch.stack(columns, 1).to(torch.int32),
    )


@cache
def _row_bytes(head_dim: int) -> Tensor:
    """Return the bytes of a token's V by width, int64 `[4]`."""
    return torch.tensor(
        [2 * head_dim if width == 16 else value_row_bytes(width, head_dim) for width in WIDTHS]
    )


class _Zones:
    """The runs of tiles with one V width of each entry; a tile with two widths is in an item of each.

    Args: channels, tokens: int64 `[E, 4]`, counts by width.
    Attributes: sizes: bytes of each entry, int64 `[E]`.
    """

    def __init__(self, channels: Tensor, tokens: Tensor, head_dim: int) -> None:
        row_bytes, channel_bits = _row_bytes(head_dim), (channels * _WIDTHS).sum(1)
        ends = tokens.cumsum(1)
        full = ends[:, -1:] // BLOCK_TOKENS * BLOCK_TOKENS
        # the short block's first tile has four fields, too, of as many lanes as the block has
        short = (ends[:, -1:] - full + 7) // 8 * 4

        def tile_of(token: Tensor) -> Tensor:
            return (
                torch.where(token < full, token, full + (token - full >= short) * TILE_TOKENS) // TILE_TOKENS
            )

        self._first, self._last = tile_of(ends - tokens), tile_of((ends - 1).clamp(min=0)) + 1
        self._tiles = (self._last - self._first) * (tokens > 0)
        self._tile_bytes = channel_bits[:, None] * (TILE_TOKENS // 8) + TILE_TOKENS * row_bytes
        self.sizes = ends[:, -1] * channel_bits // 8 + (tokens * row_bytes).sum(1)

    def per_item(self, item_bytes: Tensor) -> Tensor:
        """Return tiles per item, int64 `[E, 4]`. Args: item_bytes: int64 `[E]` or one for all."""
        return ((item_bytes.view(-1, 1) + self._tile_bytes - 1) // self._tile_bytes).clamp(min=1)

    def counts(self, per_item: Tensor) -> Tensor:
        """Return the number of items, int64 `[E, 4]`."""
        return (self._tiles + per_item - 1) // per_item

    def items(self, item_bytes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the number of items, first tile, tile after the last, tiles per item, int64 `[E, 4]`."""
        per_item = self.per_item(item_bytes)
        return self.counts(per_item), self._first, self._last, per_item


def _balanced(zones: _Zones, of_sequence: Tensor, num_programs: Tensor, item_bytes: int) -> Tensor:
    """Return the item bytes of each entry for at most `num_programs` items per sequence, or more items of
    `MAX_ITEM_BYTES`; `MAX_SPLITS` per head at most."""
    zeros = torch.zeros(int(of_sequence[-1]) + 1, dtype=torch.int64)
    total = zeros.index_add(0, of_sequence, zones.sizes)
    largest = zeros.scatter_reduce(0, of_sequence, zones.sizes, "amax")
    least = (largest // (MAX_SPLITS // 2)).clamp(min=item_bytes)
    wanted = torch.maximum(total // num_programs.clamp(min=1), least)
    # a zone's last item is short, so an equal share of the bytes makes too many
    for _ in range(_BALANCING_ROUNDS):
        counts = zones.counts(zones.per_item(wanted[of_sequence])).sum(1)
        counts = zeros.index_add(0, of_sequence, counts)
        if not bool((counts > num_programs).any()):
            break
        more = wanted * counts // num_programs.clamp(min=1)
        wanted = torch.where(counts > num_programs, torch.maximum(more, wanted + wanted // 16), wanted)
    return torch.maximum(wanted.clamp(max=MAX_ITEM_BYTES), least)[of_sequence]
