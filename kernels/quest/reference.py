"""Quest's decode attention in plain float32, written like the equation. For tests only.

Legend: H_kv KV heads, G query heads per KV head, n cached tokens, D head_dim, P page_size, k num_tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.reference import dense_decode
from kvferry.kernels.hsa.reference import attend_selected, page_extremes, select_tokens


def token_scores(queries: Tensor, keys: Tensor, *, page_size: int, scaling: float) -> Tensor:
    """`u_{g,p} = sum_d max(q_gd Kmax_pd, q_gd Kmin_pd)`; `s_t = 1/G sum_g softmax_t(scaling * u_{g,p(t)})`.

    Args: queries `[H_kv, G, D]`, keys `[H_kv, n, D]`. Returns: float32 `[H_kv, n]`.
    """
    num_kv_heads, group_size, _ = queries.shape
    page_max, page_min = page_extremes(keys.float(), page_size=page_size)
    scores = torch.zeros(num_kv_heads, keys.shape[1])
    for h in range(num_kv_heads):
        for g in range(group_size):
            q = queries[h, g].float()
            bounds = [
                torch.maximum(q * high, q * low).sum()
                for high, low in zip(page_max[h], page_min[h], strict=True)
            ]
            logits = torch.stack([scaling * bounds[t // page_size] for t in range(keys.shape[1])])
            scores[h] += torch.softmax(logits, dim=0) / group_size
    return scores


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, page_size: int, num_tokens: int, scaling: float
) -> Tensor:
    """y <- attn(q, K[top-k s], V[top-k s]), the newest token among them: float32 `[H_kv, G, D]`."""
    if keys.shape[1] <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    scores = token_scores(queries, keys, page_size=page_size, scaling=scaling)
    chosen = select_tokens(scores, num_tokens=num_tokens)
    return attend_selected(queries, keys, values, chosen, scaling=scaling)
