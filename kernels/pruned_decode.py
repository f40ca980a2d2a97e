"""Decode attention where K has a few channels of each KV head and V all of them: ThinK.

Called by the decode engine for layers whose prompt has lost K channels; new tokens have all of theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_same_kind, path_for


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
    """softmax(scaling * [q_C K^T, q K_new^T]) [V; V_new], q_C the query's retained channels (ThinK, Eq. 6).

    Args: as in `kernels`; scaling is that of all D channels.
        channels: integers `[H_kv, C]`, those of the prompt's K, in its order.
        keys: `[H_kv, n, C]`, n >= 0.
        values: `[H_kv, n, D]`.
    """
    num_kv_heads, group_size, head_dim = queries.shape
    num_rows, num_new, num_channels = values.shape[1], new_keys.shape[1], channels.shape[1]
    new = (num_kv_heads, num_new, head_dim)
    expected = (
        (num_kv_heads, num_channels), (num_kv_heads, num_rows, num_channels),
        (num_kv_heads, num_rows, head_dim), new, new,
    )  # fmt: skip
    shapes = tuple(tuple(t.shape) for t in (channels, keys, values, new_keys, new_values))
    if shapes != expected:
        raise ValueError(f"channels, K, V and new K, V are {shapes}; they must be {expected}")
    check_same_kind(queries=queries, keys=keys, values=values, new_keys=new_keys, new_values=new_values)
    if num_rows + num_new == 0:
        raise ValueError("there is neither a row of the prompt nor a new one; there must be one to attend to")
    path_for("pruned_decode", queries.device)
    index = channels.long()[:, None].expand(-1, group_size, -1)
    logits = torch.cat([queries.gather(2, index) @ keys.mT, queries @ new_keys.mT], dim=2).float()
    probabilities = (logits * scaling).softmax(dim=-1).to(queries.dtype)
    return probabilities[:, :, :num_rows] @ values + probabilities[:, :, num_rows:] @ new_values
