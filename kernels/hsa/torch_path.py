"""Hybrid sparse attention in vectorised torch: no loop over heads, tokens or pages. Arguments are checked by
the dispatch in `__init__.py`; shapes are as documented there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.torch_path import dense_decode
from kvferry.kernels.top_tokens import attend_tokens, head_starts, top_tokens

MIN_NORM = 1e-30
"""What |q_I1|_1 of a head that is zero on I1 is taken for."""


def write_page_extremes(keys: Tensor, page_max: Tensor, page_min: Tensor, *, page_size: int) -> None:
    """Extremes of all pages that `keys` covers, written to the front of `page_max` and `page_min`."""
    num_kv_heads, length, head_dim = keys.shape
    num_full = length // page_size
    pages = keys[:, : num_full * page_size].reshape(num_kv_heads, num_full, page_size, head_dim)
    torch.amax(pages, dim=2, out=page_max[:, :num_full])
    torch.amin(pages, dim=2, out=page_min[:, :num_full])
    if length % page_size:
        rest = keys[:, num_full * page_size :]
        page_max[:, num_full] = rest.amax(1)
        page_min[:, num_full] = rest.amin(1)


def update_page_extremes(
    page_max: Tensor, page_min: Tensor, key: Tensor, *, position: int, page_size: int
) -> None:
    """Fold one new row into its page; the first row of a page starts it."""
    highest, lowest = page_max[:, position // page_size], page_min[:, position // page_size]
    if position % page_size == 0:
        highest.copy_(key)
        lowest.copy_(key)
    else:
        torch.maximum(highest, key, out=highest)
        torch.minimum(lowest, key, out=lowest)


@dataclass(frozen=True, kw_only=True)
class RankedQueries:
    """Some heads' queries over the channels that they rank highest.

    Attributes:
        channels: I1, int64 `[H_kv, k1]`.
        queries: float32 `[H_kv, G, k1]`, divided by the temperature.
        below: bool `[H_kv, k1]`, whether the channel reads Kmin.
    """

    channels: Tensor
    queries: Tensor
    below: Tensor

    def heads(self, start: int, stop: int) -> RankedQueries:
        """Those of KV heads `start` to `stop`."""
        return RankedQueries(
            channels=self.channels[start:stop], queries=self.queries[start:stop], below=self.below[start:stop]
        )


def rank_channels(queries: Tensor, *, num_channels: int) -> RankedQueries:
    """The first part of step 2 of Algorithm 1, for the KV heads of one sequence or of several.

    Args: queries `[H_kv, G, D]`.
    """
    q = queries.float()
    _, group_size, head_dim = q.shape
    magnitudes = torch.linalg.vector_norm(q, ord=1, dim=1)
    channels = magnitudes.sort(dim=-1, descending=True, stable=True).indices[:, :num_channels]
    q_kept = q.gather(2, channels[:, None].expand(-1, group_size, -1))
    below = q_kept.sum(1) < 0
    # 1 / temperature, sqrt(|q|_1 / (D |q_I1|_1)); a head that is zero on I1 has logits of zero whatever it is
    l1 = torch.linalg.vector_norm(q, ord=1, dim=-1, keepdim=True)
    l1_kept = torch.linalg.vector_norm(q_kept, ord=1, dim=-1, keepdim=True)
    shrink = torch.div(l1, l1_kept.clamp_(min=MIN_NORM)).mul_(1 / head_dim).sqrt_()
    return RankedQueries(channels=channels, queries=q_kept.mul_(shrink), below=below)


def select_tokens(
    ranked: RankedQueries,
    page_max: Tensor,
    page_min: Tensor,
    *,
    length: int,
    page_size: int,
    num_tokens: int,
) -> Tensor:
    """The rest of step 2: int64 `[H_kv, k2]`, the newest token first, then by falling score."""
    # softmax over tokens: a page's term counts once for each token it holds, and all but the last hold P
    weights = _page_logits(ranked, page_max, page_min).softmax(dim=-1)
    missing = page_max.shape[1] * page_size - length
    if missing:
        weights /= torch.rsub(weights[..., -1:], page_size, alpha=missing)
    # summed over G: one token's share, or as many times as much for every token alike
    return top_tokens(weights.sum(1), num_tokens, length=length, page_size=page_size)


def _page_logits(ranked: RankedQueries, page_max: Tensor, page_min: Tensor) -> Tensor:
    """Each page's estimate, float32 `[H_kv, G, pages]`."""
    q, channels, below = ranked.queries, ranked.channels, ranked.below
    lying = _channel_rows(page_max, page_min)
    if lying is not None:
        rows, first, apart = lying
        index = torch.add(channels + first, below, alpha=apart).flatten()
        return torch.bmm(q, rows.index_select(0, index).view(*channels.shape, -1).float())
    # reading whole rows with zeros in q beats gathering single channels
    wide = (channels.shape[0], q.shape[1], page_max.shape[2])
    index = channels[:, None].expand_as(q)
    q_max = q.masked_fill(below[:, None], 0.0)
    logits = torch.bmm(q.new_zeros(wide).scatter_(2, index, q_max), page_max.float().mT)
    return logits.baddbmm_(q.new_zeros(wide).scatter_(2, index, q - q_max), page_min.float().mT)


def _channel_rows(page_max: Tensor, page_min: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Both extremes as rows of one channel each, where they lie so: channel by channel in one storage, at
    equal distances; None where not.

    Returns: `[n, pages]`; the row of each head's channel 0 of Kmax, int64 `[H_kv, 1]`; how many rows after it
        the same channel of Kmin lies.
    """
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
    return page_max.as_strided((size, num_pages), (row, 1)), first, apart // row


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
    scaling: float,
    ranked: RankedQueries | None = None,
) -> Tensor:
    """Steps 2 and 3 of Algorithm 1 over exactly the rows and pages given.

    Args: ranked: `rank_channels` of the queries, where it is known already.
    """
    length = keys.shape[1]
    if length <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    selected = select_tokens(
        rank_channels(queries, num_channels=num_channels) if ranked is None else ranked,
        page_max,
        page_min,
        length=length,
        page_size=page_size,
        num_tokens=num_tokens,
    )
    return attend_tokens(queries, keys, values, selected, scaling=scaling)
