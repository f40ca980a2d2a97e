"""Hybrid sparse attention (HSA) in plain float32, written like RocketKV's Algorithm 1. For tests only.

Legend: H_kv KV heads, G query heads per KV head, n cached tokens, D head_dim, P page_size, k1 num_channels,
k2 num_tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.reference import dense_decode


def page_extremes(keys: Tensor, *, page_size: int) -> tuple[Tensor, Tensor]:
    """Step 1: elementwise maximum and minimum of each page of P tokens; the last page may be partial.

    Args: keys `[H_kv, n, D]`. Returns: Kmax and Kmin `[H_kv, ceil(n / P), D]`.
    """
    num_tokens = keys.shape[1]
    pages = [keys[:, i : min(i + page_size, num_tokens)] for i in range(0, num_tokens, page_size)]
    return torch.stack([p.amax(1) for p in pages], 1), torch.stack([p.amin(1) for p in pages], 1)


def token_scores(
    queries: Tensor, page_max: Tensor, page_min: Tensor, *, length: int, page_size: int, num_channels: int
) -> Tensor:
    """Step 2: the mean over a group of each head's estimated softmax over tokens.

    Args:
        queries: `[H_kv, G, D]`.
        page_max, page_min: `[H_kv, ceil(length / P), D]`.

    Returns:
        float32 `[H_kv, length]`.
    """
    num_kv_heads, group_size, head_dim = queries.shape
    scores = torch.zeros(num_kv_heads, length)
    for h in range(num_kv_heads):
        q = queries[h].float()
        # i1 <- argtopk(sum(|q|, group), k1), the lowest index first among equals
        i1 = torch.sort(q.abs().sum(0), descending=True, stable=True).indices[:num_channels]
        # P <- Kmax[i: g_i >= 0], Kmin[i: g_i < 0] with g = sign(sum(q[i1], group))
        positive = q.sum(0)[i1] >= 0
        estimate = torch.where(positive, page_max[h].float()[:, i1], page_min[h].float()[:, i1])
        for g in range(group_size):
            # SparQ's temperature makes up for the channels left out
            l1_all, l1_kept = q[g].abs().sum(), q[g, i1].abs().sum()
            temperature = math.sqrt(head_dim * float(l1_kept / l1_all)) if l1_kept > 0 else 1.0
            page_logits = (estimate @ q[g, i1]) / temperature
            token_logits = torch.stack([page_logits[i // page_size] for i in range(length)])
            scores[h] += torch.softmax(token_logits, dim=0) / group_size
    return scores


def select_tokens(scores: Tensor, *, num_tokens: int) -> Tensor:
    """i2 <- argtopk(s1, k2) with the newest token always inside, the lowest index first among equals.

    Deviation: the paper forces no token; a token that cannot see itself degrades short generations.

    Args: scores `[H_kv, n]`, n > k2. Returns: int64 `[H_kv, k2]`, ascending.
    """
    length = scores.shape[1]
    selected = []
    for row in scores:
        older = torch.sort(row[: length - 1], descending=True, stable=True).indices[: num_tokens - 1]
        selected.append(torch.cat([older.sort().values, torch.tensor([length - 1])]))
    return torch.stack(selected)


def attend_selected(
    queries: Tensor, keys: Tensor, values: Tensor, selected: Tensor, *, scaling: float
) -> Tensor:
    """attn(q, K[i], V[i]) of each head's selected tokens int64 `[H_kv, k]`: float32 `[H_kv, G, D]`."""
    heads = torch.arange(keys.shape[0])[:, None]
    return dense_decode(queries, keys[heads, selected], values[heads, selected], scaling=scaling)


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
    """Steps 2 and 3: y <- attn(q, K[i2], V[i2]).

    Args: keys and values `[H_kv, n, D]`, page extremes `[H_kv, ceil(n / P), D]`. Returns: float32
    `[H_kv, G, D]`.
    """
    length = keys.shape[1]
    if length <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    scores = token_scores(
        queries, page_max, page_min, length=length, page_size=page_size, num_channels=num_channels
    )
    i2 = select_tokens(scores, num_tokens=num_tokens)
    return attend_selected(queries, keys, values, i2, scaling=scaling)
