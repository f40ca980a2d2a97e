"""Attention on pruned K head by head in float32, written like the equation. For tests only.

Legend: H_kv KV heads, G query heads per KV head, n rows of the prompt, C retained channels, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pruned_decode(
    queries: Tensor,
    channels: Tensor,
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """As `kernels.pruned_decode.pruned_decode`, with K's lost channels as zeros. Returns float32."""
    output = torch.empty(queries.shape, dtype=torch.float32)
    for head in range(queries.shape[0]):
        whole = torch.zeros(keys.shape[1], queries.shape[2])
        for i, channel in enumerate(channels[head].tolist()):
            whole[:, channel] = keys[head, :, i].float()
        all_keys = torch.cat([whole, new_keys[head].float()])
        all_values = torch.cat([values[head], new_values[head]]).float()
        for group in range(queries.shape[1]):
            logits = scaling * (all_keys @ queries[head, group].float())
            output[head, group] = torch.softmax(logits, dim=0) @ all_values
    return output
