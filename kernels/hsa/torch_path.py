"""Hybrid sparse attention in vectorised torch: no loop over heads, tokens or pages. Arguments are checked by
the dispatch in `__init__.py`; shapes are as documented there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.torch_path import dense_decode
from kvferry.kernels.top_tokens import attend_tokens, top_tokens


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
    page = position // page_size
    if position % page_size == 0:
        page_max[:, page] = key
        page_min[:, page] = key
    else:
        torch.maximum(page_max[:, page], key, out=page_max[:, page])
        torch.minimum(page_min[:, page], key, out=page_min[:, page])


def select_tokens(
    queries: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    length: int,
    page_size: int,
    num_channels: int,
    num_tokens: int,
) -> Tensor:
    """Step 2 of Algorithm 1: int64 `[H_kv, k2]`, the newest token first, then by falling score."""
    head_dim, num_pages = queries.shape[2], page_max.shape[1]
    q = queries.float()
    q_abs = q.abs()
    channels = q_abs.sum(1).sort(dim=-1, descending=True, stable=True).indices[:, :num_channels]
    chosen = torch.zeros(q.shape[0], head_dim, dtype=torch.bool, device=q.device).scatter_(1, channels, True)
    # reading whole rows with zeros in q beats gathering single channels on every device without our kernel
    q_kept = torch.where(chosen[:, None], q, 0.0)
    positive = q.sum(1, keepdim=True) >= 0
    q_positive = torch.where(positive, q_kept, 0.0)
    logits = torch.bmm(q_positive, page_max.float().mT)
    logits = logits.baddbmm_(q_kept - q_positive, page_min.float().mT)

    l1_kept = q_kept.abs().sum(-1, keepdim=True)
    temperature = (head_dim * l1_kept / q_abs.sum(-1, keepdim=True)).sqrt()
    # a head that is zero on these channels has logits of zero whatever it is divided by
    temperature = torch.where(l1_kept > 0, temperature, 1.0)
    logits /= temperature  # [H_kv, G, pages]

    # softmax over tokens: a page's term counts once for each token it holds, and all but the last hold P
    weights = logits.softmax(dim=-1)
    missing = num_pages * page_size - length
    if missing:
        weights = weights / (page_size - missing * weights[..., -1:])
    scores = weights.mean(1)  # [H_kv, pages], one token's share, or P times as much where all pages are full

    token_scores = scores.repeat_interleave(page_size, dim=1)[:, :length]
    return top_tokens(token_scores, num_tokens)


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
) -> Tensor:
    """Steps 2 and 3 of Algorithm 1 over exactly the rows and pages given."""
    length = keys.shape[1]
    if length <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    selected = select_tokens(
        queries,
        page_max,
        page_min,
        length=length,
        page_size=page_size,
        num_channels=num_channels,
        num_tokens=num_tokens,
    )
    return attend_tokens(queries, keys, values, selected, scaling=scaling)
