"""TriZone attention in torch, head by head and tile by tile: heads are ragged, and no more than one tile of
codes is ever unpacked at a time. Arguments are checked by the dispatch in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedHead, PackedLayer
from kvferry.kernels.packed.key_words import BLOCK_TOKENS, WIDTHS, key_tiles
from kvferry.kernels.packed.value_rows import unpack_value_rows

TILE_TOKENS = 8 * BLOCK_TOKENS
"""Tokens whose codes are float32 at a time (512 KiB at D = 128)."""


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
    output = torch.empty_like(queries)
    for h in range(queries.shape[0]):
        heads = [packed.heads[h] for packed in segments]
        sizes = [head.counts.num_tokens for head in heads]
        head_queries = queries[h].float() * scaling
        logits = head_queries.new_empty(queries.shape[1], sum(sizes) + new_keys.shape[1])
        *kept, new = torch.split(logits, [*sizes, new_keys.shape[1]], dim=1)
        for head, part in zip(heads, kept, strict=True):
            _packed_logits(head, head_queries, part)
        torch.mm(head_queries, new_keys[h].float().T, out=new)
        *kept, new = torch.split(logits.softmax(dim=-1), [*sizes, new_keys.shape[1]], dim=1)
        attended = new @ new_values[h].float()
        for head, part in zip(heads, kept, strict=True):
            _add_packed_values(head, part, attended)
        output[h] = attended
    return output


def _packed_logits(head: PackedHead, queries: Tensor, logits: Tensor) -> None:
    """Write zone A's logits. Args: queries float32 `[G, D]`, already scaled; logits out, `[G, n]`."""
    counts = head.counts
    coded = sum(counts.channels[:3])
    permuted = queries[:, head.channels.long()]
    bias = permuted[:, :coded] @ head.key_minima
    permuted[:, :coded] *= head.key_scales
    tiles = key_tiles(
        head.key_words, counts.channels, counts.num_tokens, max_blocks=TILE_TOKENS // BLOCK_TOKENS
    )
    for start, codes in tiles:
        torch.addmm(bias[:, None], permuted, codes, out=logits[:, start : start + codes.shape[1]])


def _add_packed_values(head: PackedHead, probabilities: Tensor, output: Tensor) -> None:
    """Add zones A's and B's values. Args: probabilities `[G, n]`, packed order; output in place, `[G, D]`."""
    head_dim = output.shape[1]
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
                output.addmm_(scaled[:, start:stop], unpack_value_rows(tile, width, head_dim))
            start = stop
