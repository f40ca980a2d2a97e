"""SparQ's decode attention in plain float32, written like its Algorithm 1. For tests only.

Legend: H_kv KV heads, G query heads per KV head, n cached tokens, D head_dim, r num_channels, k num_tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.reference import dense_decode
from kvferry.kernels.hsa.reference import select_tokens


def approximate_scores(queries: Tensor, keys: Tensor, *, num_channels: int, scaling: float) -> Tensor:
    """Steps 1 and 2: `s_g = softmax(q_g[i1] . K[i1] / tau_g)`,
    `tau_g = sqrt(|q_g[i1]|_1 / |q_g|_1) / scaling`.

    Args: queries `[H_kv, G, D]`, keys `[H_kv, n, D]`. Returns: float32 `[H_kv, G, n]`.
    """
    num_kv_heads, group_size, _ = queries.shape
    scores = torch.zeros(num_kv_heads, group_size, keys.shape[1])
    for h in range(num_kv_heads):
        q = queries[h].float()
        # i1 <- argtopk(sum(|q|, group), r), the lowest index first among equals
        i1 = torch.sort(q.abs().sum(0), descending=True, stable=True).indices[:num_channels]
        for g in range(group_size):
            l1_all, l1_kept = float(q[g].abs().sum()), float(q[g, i1].abs().sum())
            tau = math.sqrt(l1_kept / l1_all) / scaling if l1_kept > 0 else 1.0
            scores[h, g] = torch.softmax(keys[h].float()[:, i1] @ q[g, i1] / tau, dim=0)
    return scores


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, num_channels: int, num_tokens: int, scaling: float
) -> Tensor:
    """Step 3: `y_g = alpha_g attn(q_g, K[i2], V[i2]) + (1 - alpha_g) mean(V)`: float32 `[H_kv, G, D]`."""
    if keys.shape[1] <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    scores = approximate_scores(queries, keys, num_channels=num_channels, scaling=scaling)
    i2 = select_tokens(scores.mean(1), num_tokens=num_tokens)
    output = torch.zeros(queries.shape)
    for h in range(keys.shape[0]):
        exact = dense_decode(
            queries[h : h + 1], keys[h : h + 1, i2[h]], values[h : h + 1, i2[h]], scaling=scaling
        )
        mean = values[h].float().mean(0)
        for g in range(queries.shape[1]):
            alpha = scores[h, g, i2[h]].sum()
            output[h, g] = alpha * exact[0, g] + (1 - alpha) * mean
    return output
