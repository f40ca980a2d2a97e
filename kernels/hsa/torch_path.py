"""Hybrid sparse attention in vectorised torch: no loop over heads, tokens or pages.

`__init__.py` checks arguments and documents shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.kernels.torch_attention import (
    JointRows,
    attend_rows,
    attend_tokens,
    head_starts,
    top_indices,
    top_tokens,
)

MIN_MAGNITUDE = 1e-30
"""Added to norms, so that none is zero."""


@dataclass(frozen=True, kw_only=True)
class RankedQueries:
    """Some heads' queries, restricted to their highest-ranked channels.

    Attributes:
        channels: I1, int64 `[H_kv, k1]`.
        queries: float32 `[H_kv, G, k1]`, times the softmax scale, divided by the temperature.
        below: bool `[H_kv, k1]`, whether Kmin is read for the channel, not Kmax.
    """

    channels: Tensor
    queries: Tensor
    below: Tensor

    def heads(self, start: int, stop: int) -> RankedQueries:
        return RankedQueries(
            channels=self.channels[start:stop], queries=self.queries[start:stop], below=self.below[start:stop]
        )


def rank_channels(queries: Tensor, *, num_channels: int, scaling: float) -> RankedQueries:
    """Rank the channels for KV heads of one or several sequences: the first part of step 2 of Algorithm 1.

    With so few numbers, loading an operator's code takes most of the time: of two equivalent operators, the
    one that the step has already used is faster.

    Args: queries `[H_kv, G, D]`.
    """
    q = queries.float()
    magnitudes = q.abs()
    channels = top_indices(magnitudes.sum(1), num_channels)
    index = channels.unsqueeze(1).expand(-1, q.shape[1], -1)
    q_kept = q.gather(2, index)
    # a sum of -0.0 has only zeros, so that the choice of extreme does not matter
    below = q_kept.sum(1).signbit()
    # scaling / temperature, the temperature sqrt(|q_I1|_1 / |q|_1); a head that is zero on I1 has logits of
    # zero at any temperature except zero
    l1_kept = torch.linalg.vector_norm(q_kept, 1, -1, True).add_(MIN_MAGNITUDE)
    shrink = torch.div(l1_kept, magnitudes.sum(-1, keepdim=True)).rsqrt_().mul_(scaling)
    return RankedQueries(channels=channels, queries=q_kept.mul_(shrink), below=below)


def select_tokens(
    ranked: RankedQueries,
    page_max: Tensor,
    page_min: Tensor,
    *,
    length: int,
    page_size: int,
    num_tokens: int,
    rows: ChannelRows | None = None,
) -> Tensor:
    """Select tokens, the rest of step 2: int64 `[H_kv, k2]`, in no particular order.

    Args: page_max, page_min: of at least the first `length` rows; rows: `ChannelRows.of` them.
    """
    num_pages = -(-length // page_size)
    q, channels, below = ranked.queries, ranked.channels, ranked.below
    if rows is not None:
        logits = torch.bmm(q, rows.gather(channels, below, num_pages=num_pages).float())
    else:
        # reading whole rows with zeros in q is faster than gathering single channels
        wide = (channels.shape[0], q.shape[1], page_max.shape[2])
        index = channels[:, None].expand_as(q)
        q_max = q.masked_fill(below[:, None], 0.0)
        highest, lowest = page_max.narrow(1, 0, num_pages).float(), page_min.narrow(1, 0, num_pages).float()
        logits = torch.bmm(q.new_zeros(wide).scatter_(2, index, q_max), highest.mT)
        logits.baddbmm_(q.new_zeros(wide).scatter_(2, index, q - q_max), lowest.mT)
    # softmax over tokens: a page's term counts once for each of its tokens, P in all pages but the last
    in_last = length - (num_pages - 1) * page_size
    if in_last == 1:
        # the newest token, whose score is not used
        logits.select(2, -1).sub_(math.log(page_size))
    weights = logits.softmax(dim=-1)
    if 1 < in_last < page_size:
        weights /= torch.rsub(weights[..., -1:], page_size, alpha=page_size - in_last)
    # the sum over G selects the same tokens as the mean
    scores = weights.sum(1)
    return top_tokens(scores, num_tokens, length=length, page_size=page_size)


@dataclass(frozen=True, kw_only=True)
class ChannelRows:
    """Both extremes of all heads as rows of one channel each.

    Attributes:
        rows: `[n, pages]`.
        first: int64 `[H_kv, 1]`, the row of each head's channel 0 of Kmax.
        apart: rows from a channel of Kmax to the same one of Kmin.
    """

    rows: Tensor
    first: Tensor
    apart: int

    @classmethod
    def of(cls, page_max: Tensor, page_min: Tensor) -> ChannelRows | None:
        """View extremes as rows; None unless stored channel by channel, evenly spaced in one storage."""
        num_kv_heads, num_pages, head_dim = page_max.shape
        head_stride, page_stride, row = page_max.stride()
        if page_stride != 1 or row < num_pages or page_min.stride() != page_max.stride():
            return None
        if page_min.untyped_storage().data_ptr() != page_max.untyped_storage().data_ptr():
            return None
        apart = page_min.storage_offset() - page_max.storage_offset()
        if apart < 0 or apart % row or head_stride % row:
            return None
        size = (apart + (num_kv_heads - 1) * head_stride) // row + head_dim
        first = head_starts(num_kv_heads, head_stride // row, page_max.device)
        return cls(rows=page_max.as_strided((size, num_pages), (row, 1)), first=first, apart=apart // row)

    def gather(self, channels: Tensor, below: Tensor, *, num_pages: int) -> Tensor:
        """Gather some channels' extremes `[H_kv, k1, pages]`. Args: as of `RankedQueries`."""
        index = torch.add(channels + self.first, below, alpha=self.apart)
        rows = self.rows.narrow(1, 0, num_pages)
        return rows.index_select(0, index.view(-1)).view(*channels.shape, num_pages)


@dataclass(frozen=True, kw_only=True)
class CacheViews:
    """One sequence's cache in one layer as a step reads it, made once.

    Attributes: `ChannelRows` and `JointRows` of all its pages and rows, None if its memory is not laid out
    so.
    """

    channels: ChannelRows | None
    rows: JointRows | None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, page_max: Tensor, page_min: Tensor) -> CacheViews:
        """Make the views. Args: `[H_kv, cap, D]`, and `[H_kv, ceil(cap / P), D]`."""
        return cls(channels=ChannelRows.of(page_max, page_min), rows=JointRows.of(keys, values))


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: Scaling,
    ranked: RankedQueries | None = None,
    views: CacheViews | None = None,
) -> Tensor:
    """Run steps 2 and 3 of Algorithm 1 over exactly the rows given.

    Args: page_max, page_min: of at least these rows; ranked: `rank_channels` of the queries, if known
        already; views: of the cache that rows and pages are the front of, if known already.
    """
    length, scale = keys.shape[1], scaling.scaling if isinstance(scaling, Softmax) else scaling
    if length <= num_tokens:
        return attend_rows(queries, keys, values, scaling=scaling)
    views = views or CacheViews.of(keys, values, page_max, page_min)
    selected = select_tokens(
        ranked or rank_channels(queries, num_channels=num_channels, scaling=scale),
        page_max,
        page_min,
        length=length,
        page_size=page_size,
        num_tokens=num_tokens,
        rows=views.channels,
    )
    return attend_tokens(queries, keys, values, selected, scaling=scaling, joint=views.rows)
