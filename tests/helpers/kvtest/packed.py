"""Packed layers in tests: dequantised whole, poisoned, and attended without segments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvferry.kernels.packed.key_words import WIDTHS, block_runs, key_tiles
from kvferry.kernels.packed.layer import PackedHead, PackedLayer, view_packed_layer
from kvferry.kernels.packed.value_rows import unpack_value_rows
from kvferry.kernels.trizone import trizone_decode_segments

GROUP_BOUNDARIES = (1, 8, 9, 63, 64, 65, 72, 127, 128, 129, 191, 192, 193, 256, 300)
"""Numbers of tokens at which groups begin or end, and some between them."""


def group_of(token: int, num_tokens: int) -> int:
    """Which of its head's scales of K a token has.

    A block has 128 tokens in eight rows of 16; the last one is shorter, its rows as short as they can be.
    Rows 0 to 3 are one group and rows 4 to 7 the next, but for a last block of at most 64 tokens, which is
    one.
    """
    block, inside = divmod(token, 128)
    in_block = min(num_tokens - 128 * block, 128)
    row = inside // math.ceil(in_block / 8)
    return 2 * block + (1 if row >= 4 and in_block > 64 else 0)


def unpack_layer(packed: PackedLayer) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Dequantise everything, head by head.

    Returns: for each head, K and V float32 `[n, D]` in packed order (dropped channels are 0) and positions
        int64 `[n]`.
    """
    return [_unpack_head(head, packed.layout.head_dim) for head in packed.heads]


def trizone_decode(
    queries: Tensor, packed: PackedLayer, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """`trizone_decode_segments` over one packed layer."""
    return trizone_decode_segments(queries, (packed,), new_keys, new_values, scaling=scaling)


def poison_padding(packed: PackedLayer) -> PackedLayer:
    """The same layer with NaN patterns in every byte between regions and in K's padding tokens."""
    used = torch.zeros(packed.layout.size_bytes, dtype=torch.bool)
    poisoned = packed.buffer.clone()
    for regions in packed.layout.regions:
        for region in regions.values():
            used[region.offset : region.offset + region.size_bytes] = True
    poisoned[~used] = 0xFF
    viewed = view_packed_layer(packed.layout, poisoned)
    for head in viewed.heads:
        counts = head.counts
        if counts.num_tokens % 8 == 0:
            continue
        _, lanes = block_runs(counts.num_tokens)[-1]
        # The last channels are float16, at the end of the short block: one lane row a group of R tokens.
        block = head.key_words[len(head.key_words) - counts.channels[3] * 16 * lanes :]
        halves = block.view(torch.float16).view(counts.channels[3], 8 * lanes)
        halves[:, counts.num_tokens % 128 :] = float("nan")
    return viewed


def _unpack_head(head: PackedHead, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = head.counts
    coded = sum(counts.channels[:3])
    channels = head.channels.long()
    groups = [group_of(token, counts.num_tokens) for token in range(counts.num_tokens)]
    keys = torch.zeros(counts.num_tokens, head_dim, device=head.key_words.device)
    for start, codes in key_tiles(head.key_words, counts.channels, counts.num_tokens, max_blocks=64):
        tile_groups = groups[start : start + codes.shape[1]]
        codes[:coded] = codes[:coded] * head.key_scales[tile_groups].T + head.key_minima[tile_groups].T
        keys[start : start + codes.shape[1], channels] = codes.T
    rows = [
        unpack_value_rows(packed, width, head_dim)
        for width, packed in zip(WIDTHS[:3], (head.values_2, head.values_4, head.values_8), strict=True)
    ]
    low = torch.cat(rows) * head.value_scales[:, None] + head.value_minima[:, None]
    return keys, torch.cat([low, head.values_16.float()]), head.positions.long()
