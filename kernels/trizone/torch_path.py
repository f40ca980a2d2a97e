"""TriZone attention in torch: softmax and new tokens for all heads at once; codes head by head, because heads
are ragged, and no more than one tile of them as floats at a time. Arguments are checked by the dispatch in
`__init__.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedHead, PackedLayer
from kvferry.kernels.packed.key_products import lay_key_products, padded_tokens
from kvferry.kernels.packed.layer import QueryTables
from kvferry.kernels.packed.tiles import Tiles, scratch
from kvferry.kernels.packed.value_rows import lay_value_products

MIN_WEIGHT = 1e-30
"""Softmax weights below this add nothing that float32 could hold, and where they are too small to be normal
floats, products with them take many times as long."""
NEW_TOKENS = 64
"""A plan has room for a multiple of so many new tokens."""


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """As `kernels.trizone.trizone_decode_segments`."""
    plans, thread = segments[0].plans, threading.get_ident()
    plan: DecodePlan | None = plans.get(thread)
    num_new = new_keys.shape[1]
    if plan is None or not plan.serves(segments, queries.shape[1], num_new):
        plans[thread] = plan = DecodePlan(segments, queries.shape[1], num_new)
    attended = plan.attend(queries.float() * scaling, new_keys.float(), new_values.float())
    return attended.to(queries.dtype)


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """Zone A's logits of one segment.

    Attributes:
        channels: `tables.channels`, for each query.
        queries: the queries' channels in packed order, times K's scales; bias: the minima's part.
    """

    tables: QueryTables
    channels: Tensor
    queries: Tensor
    bias: Tensor
    tiles: Tiles


class DecodePlan:
    """All views that a step of some segments takes, made once: of their bytes, and of the memory of the
    thread that makes it, which alone may use it.

    Logits lie by head: room for new tokens, then what is packed; what a head has no token for is minus
    infinity.
    """

    def __init__(self, segments: Sequence[PackedLayer], group_size: int, num_new: int) -> None:
        first, device = segments[0], segments[0].buffer.device
        # no reference to the first segment, which keeps the plan
        self._others = [weakref.ref(segment) for segment in segments[1:]]
        self._group_size = group_size
        self._room = -(-num_new // NEW_TOKENS) * NEW_TOKENS
        num_kv_heads, head_dim = len(first.heads), first.layout.head_dim
        starts = self._starts(segments)
        width = self._room + max(
            start + padded_tokens(head.counts.num_tokens)
            for segment, of_segment in zip(segments, starts, strict=False)
            for head, start in zip(segment.heads, of_segment, strict=True)
        )
        shape = (num_kv_heads, group_size, width)
        self._logits = scratch("logits", shape, device)
        self._weights = scratch("weights", shape, device)
        self._attended = scratch("attended", (num_kv_heads, group_size, head_dim), device)
        self._minima = scratch("minima", (num_kv_heads, group_size), device)
        self._idle = [self._logits[:, :, : self._room]]
        for h, length in enumerate(starts[-1]):
            if self._room + length < width:
                self._idle.append(self._logits[h, :, self._room + length :])
        self._keys = [
            self._lay_keys(segment, of_segment) for segment, of_segment in zip(segments, starts, strict=False)
        ]
        self._scaled: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._values = Tiles(device)
        for segment, of_segment in zip(segments, starts, strict=False):
            for h, head in enumerate(segment.heads):
                start = self._room + of_segment[h]
                weights = self._weights[h, :, start : start + head.counts.num_tokens]
                self._lay_values(head, weights, self._minima[h], self._attended[h])

    def serves(self, segments: Sequence[PackedLayer], group_size: int, num_new: int) -> bool:
        """Whether it is laid down for a step. Args: segments: the first the one that keeps it."""
        return (
            group_size == self._group_size
            and self._room - NEW_TOKENS < num_new <= self._room
            and len(segments) == len(self._others) + 1
            and all(of() is segment for of, segment in zip(self._others, segments[1:], strict=True))
        )

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        """A step. Args: float32; queries `[H_kv, G, D]`, scaled. Returns: float32 `[H_kv, G, D]`."""
        num_new = new_keys.shape[1]
        for keys in self._keys:
            torch.gather(queries, 2, keys.channels, out=keys.queries)
            torch.bmm(keys.queries, keys.tables.minima, out=keys.bias)
            keys.queries.mul_(keys.tables.scales)
            keys.tiles.run()
        for idle in self._idle:
            idle.fill_(-torch.inf)
        self._logits[:, :, :num_new] = torch.bmm(queries, new_keys.mT)
        torch.softmax(self._logits, -1, out=self._weights)
        torch.threshold_(self._weights, MIN_WEIGHT, 0.0)
        torch.bmm(self._weights[:, :, :num_new], new_values, out=self._attended)
        self._minima.zero_()
        for of_codes, minima, of_minima, scales in self._scaled:
            of_minima.addmv_(of_codes, minima)
            of_codes.mul_(scales)
        self._values.run()
        return self._attended + self._minima[:, :, None]

    def _starts(self, segments: Sequence[PackedLayer]) -> list[list[int]]:
        """Of each segment, and of one after the last: the first token of each head, packed ones counted."""
        starts = [[0] * len(segments[0].heads)]
        for segment in segments:
            counts = [head.counts.num_tokens for head in segment.heads]
            starts.append([start + count for start, count in zip(starts[-1], counts, strict=True)])
        return starts

    def _lay_keys(self, segment: PackedLayer, starts: Sequence[int]) -> _Keys:
        tables, device = segment.query_tables, segment.buffer.device
        num_kv_heads, _, most = tables.channels.shape
        queries = scratch("queries", (num_kv_heads, self._group_size, most), device)
        bias = scratch("bias", (num_kv_heads, self._group_size, 1), device)
        tiles = Tiles(device)
        for h, head in enumerate(segment.heads):
            start, counts = self._room + starts[h], head.counts
            lay_key_products(
                tiles,
                head.key_words,
                counts.channels,
                counts.num_tokens,
                weights=queries[h, :, : counts.num_channels],
                bias=bias[h],
                products=self._logits[h, :, start : start + padded_tokens(counts.num_tokens)],
            )
        channels = tables.channels.expand(-1, self._group_size, -1)
        return _Keys(tables=tables, channels=channels, queries=queries, bias=bias, tiles=tiles)

    def _lay_values(self, head: PackedHead, weights: Tensor, minima: Tensor, output: Tensor) -> None:
        """Zones A's and B's values. Args: weights `[G, n]`, tokens in packed order, changed at each step; in
        place: minima `[G]`, what all channels gain alike; output `[G, D]`."""
        coded = len(head.value_scales)
        if coded:
            self._scaled.append((weights[:, :coded], head.value_minima, minima, head.value_scales))
        rows = ((2, head.values_2), (4, head.values_4), (8, head.values_8), (16, head.values_16))
        lay_value_products(self._values, weights, rows, output)
