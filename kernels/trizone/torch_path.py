"""TriZone attention in torch: softmax and new tokens for all heads at once; codes head by head, because heads
are ragged, and at most one tile of them unpacked at a time. `__init__.py` checks arguments.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import in_buckets
from kvferry.kernels.packed.key_products import padded_tokens, plan_key_products
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.tiles import Operation, Tiles, scratch
from kvferry.kernels.packed.value_rows import plan_value_products

MIN_WEIGHT = 1e-30
"""Softmax weights below this change no float32 sum. They become 0, because products with subnormal floats are
many times slower."""
NEW_TOKENS = 64
"""A plan has room for this many new tokens, or for a larger power of two."""


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    plans, thread = segments[0].plans, threading.get_ident()
    plan: DecodePlan | None = plans.get(thread)
    num_new = new_keys.shape[1]
    if plan is None or not plan.fits(segments, queries.shape[1], num_new, scaling):
        plans[thread] = plan = DecodePlan(segments, queries.shape[1], num_new, scaling)
    return plan.attend(queries.float(), new_keys.float(), new_values.float()).to(queries.dtype)


class DecodePlan:
    """All views that a step of some segments needs, made once: of their bytes, and of the scratch memory of
    the thread that makes the plan, the only one that may use it.

    Logits of a head: room for new tokens, then the packed tokens; minus infinity where there is no token.
    """

    def __init__(
        self, segments: Sequence[PackedLayer], group_size: int, num_new: int, scaling: float
    ) -> None:
        first, device = segments[0], segments[0].buffer.device
        # no reference to the first segment, which owns the plan
        self._others = [weakref.ref(segment) for segment in segments[1:]]
        self._group_size, self._scaling = group_size, scaling
        self._room = in_buckets(num_new, least=NEW_TOKENS)
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
        self._minima = scratch("minima", (num_kv_heads, group_size, 1), device)
        self._idle = [self._logits[:, :, : self._room]]
        for h, length in enumerate(starts[-1]):
            if self._room + length < width:
                self._idle.append(self._logits[h, :, self._room + length :])
        self._keys = [
            self._plan_keys(segment, of_segment)
            for segment, of_segment in zip(segments, starts, strict=False)
        ]
        self._scaling_of_values: list[Operation] = []
        self._values = Tiles(device)
        for segment, of_segment in zip(segments, starts, strict=False):
            self._plan_values(segment, of_segment)

    def fits(self, segments: Sequence[PackedLayer], group_size: int, num_new: int, scaling: float) -> bool:
        """Return whether the plan fits a step. Args: segments: the plan belongs to the first."""
        same = (group_size, scaling) == (self._group_size, self._scaling)
        same &= self._room // 2 < max(num_new, NEW_TOKENS) <= self._room
        same &= len(segments) == len(self._others) + 1
        for other, segment in zip(self._others, segments[1:], strict=False):
            same &= other() is segment
        return same

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        """Run a step. Args: float32; queries `[H_kv, G, D]`. Returns: float32 `[H_kv, G, D]`."""
        num_new = new_keys.shape[1]
        for gather, scale_and_multiply in self._keys:
            gather(queries)
            for operation in scale_and_multiply:
                operation()
        for idle in self._idle:
            idle.fill_(-torch.inf)
        new_logits = self._logits.narrow(2, 0, num_new)
        torch.mul(torch.bmm(queries, new_keys.mT), self._scaling, out=new_logits)
        torch.softmax(self._logits, -1, out=self._weights)
        torch.threshold_(self._weights, MIN_WEIGHT, 0.0)
        torch.bmm(self._weights.narrow(2, 0, num_new), new_values, out=self._attended)
        self._minima.zero_()
        for operation in self._scaling_of_values:
            operation()
        self._values.run()
        return self._attended + self._minima

    def _starts(self, segments: Sequence[PackedLayer]) -> list[list[int]]:
        """Return the first packed token of each head, for each segment and one more after the last."""
        starts = [[0] * len(segments[0].heads)]
        for segment in segments:
            counts = [head.counts.num_tokens for head in segment.heads]
            starts.append([start + count for start, count in zip(starts[-1], counts, strict=True)])
        return starts

    def _plan_keys(
        self, segment: PackedLayer, starts: Sequence[int]
    ) -> tuple[Callable[[Tensor], object], list[Operation]]:
        """Plan zone A's logits: an operation that brings queries into packed order, and those after it."""
        channels, device = _channels(segment), segment.buffer.device
        num_kv_heads, _, most = channels.shape
        queries = scratch("queries", (num_kv_heads, self._group_size, most), device)
        tiles = Tiles(device)
        for h, head in enumerate(segment.heads):
            start, counts = self._room + starts[h], head.counts
            plan_key_products(
                tiles,
                head.key_words,
                counts.channels,
                counts.num_tokens,
                scales=head.key_scales,
                minima=head.key_minima,
                queries=queries[h, :, : counts.num_channels],
                products=self._logits[h, :, start : start + padded_tokens(counts.num_tokens)],
            )
        index = channels.expand(-1, self._group_size, -1)
        return partial(torch.gather, dim=2, index=index, out=queries), [
            partial(queries.mul_, self._scaling),
            tiles.run,
        ]

    def _plan_values(self, segment: PackedLayer, starts: Sequence[int]) -> None:
        for heads in _equal_heads(segment, starts):
            coded = len(segment.heads[heads.start].value_scales)
            begin = self._room + starts[heads.start]
            if coded:
                weights = self._weights[heads.start : heads.stop, :, begin : begin + coded]
                scales = _stacked(segment, heads, "value_scales").float()[:, None]
                minima = _stacked(segment, heads, "value_minima").float()[:, :, None]
                # the minima's part is equal for all channels
                add_minima = partial(self._minima[heads.start : heads.stop].baddbmm_, weights, minima)
                self._scaling_of_values += [add_minima, partial(weights.mul_, scales)]
        for h, head in enumerate(segment.heads):
            begin = self._room + starts[h]
            weights = self._weights[h, :, begin : begin + head.counts.num_tokens]
            rows = ((2, head.values_2), (4, head.values_4), (8, head.values_8), (16, head.values_16))
            plan_value_products(self._values, weights, rows, self._attended[h])


def _channels(segment: PackedLayer) -> Tensor:
    """Return each head's channels in packed order, at most C each: int64 `[H_kv, 1, C]`, 0 behind them."""
    most = max(head.counts.num_channels for head in segment.heads)
    channels = torch.zeros(len(segment.heads), 1, most, dtype=torch.int64, device=segment.buffer.device)
    for h, head in enumerate(segment.heads):
        channels[h, 0, : head.counts.num_channels] = head.channels
    return channels


def _equal_heads(segment: PackedLayer, starts: Sequence[int]) -> list[range]:
    """Find runs of heads with equal starts and equal counts, which have evenly spaced regions."""
    runs: list[range] = []
    for h, head in enumerate(segment.heads):
        last = runs[-1].start if runs else 0
        if runs and (head.counts, starts[h]) == (segment.heads[last].counts, starts[last]):
            runs[-1] = range(last, h + 1)
        else:
            runs.append(range(h, h + 1))
    return runs


def _stacked(segment: PackedLayer, heads: range, name: str) -> Tensor:
    """View one region of equal heads as `[h, n]`."""
    first: Tensor = getattr(segment.heads[heads.start], name)
    if len(heads) == 1:
        return first[None]
    second: Tensor = getattr(segment.heads[heads.start + 1], name)
    apart = second.storage_offset() - first.storage_offset()
    return first.as_strided((len(heads), len(first)), (apart, 1))
