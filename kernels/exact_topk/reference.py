"""Exact top-k decode attention in plain float32. For tests only.

Legend: H_kv KV heads, G query heads per KV head, n cached tokens, D head_dim, t num_tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.reference import dense_decode
from kvferry.kernels.hsa.reference import attend_selected, select_tokens


def token_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """`s_t = 1/G sum_g softmax(scaling * q_g K^T)_t`: float32 `[H_kv, n]`."""
    num_kv_heads, group_size, _ = queries.shape
    scores = torch.zeros(num_kv_heads, keys.shape[1])
    for h in range(num_kv_heads):
        for g in range(group_size):
            logits = scaling * (keys[h].float() @ queries[h, g].float())
            scores[h] += torch.softmax(logits, dim=0) / group_size
    return scores


def attend(queries: Tensor, keys: Tensor, values: Tensor, *, num_tokens: int, scaling: float) -> Tensor:
    """y <- attn(q, K[top-t s], V[top-t s]), the newest token among them: float32 `[H_kv, G, D]`."""
    if keys.shape[1] <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    chosen = select_tokens(token_scores(queries, keys, scaling=scaling), num_tokens=num_tokens)
    return attend_selected(queries, keys, values, chosen, scaling=scaling)
