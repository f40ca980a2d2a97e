"""Packed layers in tests: dequantised whole, and attended without segments."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.packed.key_words import WIDTHS, key_tiles
from kvferry.kernels.packed.layer import PackedHead, PackedLayer
from kvferry.kernels.packed.value_rows import unpack_value_rows
from kvferry.kernels.trizone import trizone_decode_segments


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


def _unpack_head(head: PackedHead, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = head.counts
    coded = sum(counts.channels[:3])
    channels = head.channels.long()
    keys = torch.zeros(counts.num_tokens, head_dim, device=head.key_words.device)
    for start, codes in key_tiles(head.key_words, counts.channels, counts.num_tokens, max_blocks=64):
        codes[:coded] = codes[:coded] * head.key_scales[:, None] + head.key_minima[:, None]
        keys[start : start + codes.shape[1], channels] = codes.T
    rows = [
        unpack_value_rows(packed, width, head_dim)
        for width, packed in zip(WIDTHS[:3], (head.values_2, head.values_4, head.values_8), strict=True)
    ]
    low = torch.cat(rows) * head.value_scales[:, None] + head.value_minima[:, None]
    return keys, torch.cat([low, head.values_16.float()]), head.positions.long()
