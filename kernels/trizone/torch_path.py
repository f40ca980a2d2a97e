"""TriZone attention in torch: softmax and new tokens for all heads at once; codes head by head, because heads
are ragged, and no more than one tile of them as floats at a time. Arguments are checked by the dispatch in
`__init__.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedHead, PackedLayer
from kvferry.kernels.packed.key_products import write_key_products
from kvferry.kernels.packed.tiles import as_floats, tile_rows
from kvferry.kernels.packed.value_rows import add_value_products

MIN_WEIGHT = 1e-30
"""Softmax weights below this add nothing that float32 could hold, and where they are too small to be normal
floats, products with them take many times as long."""


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """As `kernels.trizone.trizone_decode_segments`."""
    num_kv_heads, group_size, _ = queries.shape
    num_new = new_keys.shape[1]
    counts = [[head.counts.num_tokens for head in packed.heads] for packed in segments]
    lengths = [num_new + sum(of_head) for of_head in zip(*counts, strict=True)]
    scaled = queries.float() * scaling
    # new tokens first, then what is packed; a head that keeps fewer than another ends in what has no weight
    logits = scaled.new_empty(num_kv_heads, group_size, max(lengths))
    for h, length in enumerate(lengths):
        if length < logits.shape[2]:
            logits[h, :, length:] = -torch.inf
    logits[:, :, :num_new] = torch.bmm(scaled, new_keys.float().mT)
    starts = [num_new] * num_kv_heads
    for packed, added in zip(segments, counts, strict=True):
        _write_packed_logits(scaled, packed, logits, starts)
        starts = list(map(operator.add, starts, added))

    weights = torch.threshold_(logits.softmax(dim=-1), MIN_WEIGHT, 0.0)
    attended = torch.bmm(weights[:, :, :num_new], new_values.float())
    minima = torch.zeros_like(attended[:, :, 0])
    starts = [num_new] * num_kv_heads
    for packed, added in zip(segments, counts, strict=True):
        for h, head in enumerate(packed.heads):
            of_head = weights[h, :, starts[h] : starts[h] + added[h]]
            _add_packed_values(head, of_head, attended[h], minima[h])
        starts = list(map(operator.add, starts, added))
    return attended.add_(minima[:, :, None]).to(queries.dtype)


def _write_packed_logits(queries: Tensor, packed: PackedLayer, logits: Tensor, starts: Sequence[int]) -> None:
    """Zone A's logits.

    Args: queries float32 `[H_kv, G, D]` scaled; logits `[H_kv, G, n]`, out from each head's start on.
    """
    tables = packed.query_tables
    permuted = queries.gather(2, tables.channels.expand(-1, queries.shape[1], -1))
    biases = torch.bmm(permuted, tables.minima)
    permuted *= tables.scales
    for h, head in enumerate(packed.heads):
        of_head = logits[h, :, starts[h] : starts[h] + head.counts.num_tokens]
        write_key_products(permuted[h], head.key_tiles, biases[h], of_head)


def _add_packed_values(head: PackedHead, weights: Tensor, output: Tensor, minima: Tensor) -> None:
    """Add zones A's and B's values.

    Args: weights `[G, n]`, tokens in packed order, changed; in place: output `[G, D]`, and minima `[G]`, what
        all channels gain alike.
    """
    coded = head.value_scales.shape[0]
    if coded:
        of_codes = weights[:, :coded]
        minima.addmv_(of_codes, head.value_minima)
        of_codes *= head.value_scales
    start = 0
    for width, rows in ((2, head.values_2), (4, head.values_4), (8, head.values_8)):
        if rows.shape[0]:
            add_value_products(weights[:, start : start + rows.shape[0]], rows, width, output)
            start += rows.shape[0]
    max_tokens = tile_rows(output.shape[1])
    for first in range(0, head.values_16.shape[0], max_tokens):
        tile = head.values_16[first : first + max_tokens]
        output.addmm_(weights[:, start + first : start + first + tile.shape[0]], as_floats(tile))
