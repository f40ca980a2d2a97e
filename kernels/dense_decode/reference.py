"""Dense decode attention in float32, written like the equation. For tests only.

Legend: H_kv KV heads, G query heads per KV head, n cached tokens, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_decode(queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
    """softmax(scaling * q K^T) V for one new token of one sequence and layer.

    Args:
        queries: `[H_kv, G, D]`.
        keys, values: `[H_kv, n, D]`, n >= 1, the new token's row included.
        scaling: the softmax scale.

    Returns:
        float32 `[H_kv, G, D]`.
    """
    num_kv_heads, group_size, _ = queries.shape
    output = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
    for h in range(num_kv_heads):
        for g in range(group_size):
            logits = scaling * (keys[h].float() @ queries[h, g].float())
            output[h, g] = torch.softmax(logits, dim=0) @ values[h].float()
    return output
