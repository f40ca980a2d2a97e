"""TriZone attention in torch, head by head and tile by tile: heads are ragged, and no more than one tile of
codes is ever unpacked at a time. Arguments are checked by the dispatch in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedHead, PackedLayer
from kvferry.kernels.packed.key_words import BLOCK_TOKENS, WIDTHS, add_key_products
from kvferry.kernels.packed.value_rows import add_value_products

TILE_TOKENS = 32 * BLOCK_TOKENS
"""Tokens whose codes are float32 at a time (2 MiB at D = 128)."""


def trizone_decode(
    queries: Tensor, packed: PackedLayer, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """As `kernels.trizone.trizone_decode`."""
    return trizone_decode_segments(queries, (packed,), new_keys, new_values, scaling=scaling)


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """As `kernels.trizone.trizone_decode_segments`."""
    scaled = queries.float() * scaling
    new_logits = torch.bmm(scaled, new_keys.float().mT)
    new_weights = torch.empty_like(new_logits)
    attended = torch.empty_like(scaled)
    for h in range(queries.shape[0]):
        heads = [packed.heads[h] for packed in segments]
        logits = [_packed_logits(head, scaled[h]) for head in heads]
        weights = torch.cat([*logits, new_logits[h]], dim=1).softmax(dim=-1)
        *kept, new_weights[h] = torch.split(
            weights, [head.counts.num_tokens for head in heads] + [new_keys.shape[1]], dim=1
        )
        attended[h] = 0
        for head, part in zip(heads, kept, strict=True):
            _add_packed_values(head, part, attended[h])
    return attended.baddbmm_(new_weights, new_values.float()).to(queries.dtype)


def _packed_logits(head: PackedHead, queries: Tensor) -> Tensor:
    """Zone A's logits, float32 `[G, n]`. Args: queries float32 `[G, D]`, already scaled."""
    counts = head.counts
    coded = sum(counts.channels[:3])
    permuted = queries[:, head.channels.long()]
    bias = permuted[:, :coded] @ head.key_minima
    permuted[:, :coded] *= head.key_scales
    logits = bias[:, None].repeat(1, counts.num_tokens)
    add_key_products(
        permuted,
        head.key_words,
        counts.channels,
        counts.num_tokens,
        logits,
        max_blocks=TILE_TOKENS // BLOCK_TOKENS,
    )
    return logits


def _add_packed_values(head: PackedHead, probabilities: Tensor, output: Tensor) -> None:
    """Add zones A's and B's values. Args: probabilities `[G, n]`, packed order; output in place, `[G, D]`."""
    coded = sum(head.counts.tokens[:3])
    output += (probabilities[:, :coded] @ head.value_minima)[:, None]
    scaled = probabilities[:, :coded] * head.value_scales
    start = 0
    for width, rows in zip(
        WIDTHS, (head.values_2, head.values_4, head.values_8, head.values_16), strict=True
    ):
        for tile in torch.split(rows, TILE_TOKENS) if len(rows) else ():
            stop = start + len(tile)
            if width == 16:
                output.addmm_(probabilities[:, start:stop], tile.float())
            else:
                add_value_products(scaled[:, start:stop], tile, width, output)
            start = stop
