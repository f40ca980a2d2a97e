"""Decode attention to every row in plain float32, written like the equations. For tests only.

Legend: H_kv KV heads, G query heads per KV head, n cached tokens, m new rows, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.softmax import Softmax
from kvtest.packed import unpack_layer


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


def softmax_decode(queries: Tensor, keys: Tensor, values: Tensor, *, softmax: Softmax) -> Tensor:
    """As `dense_decode`, with capped logits and a sink for each query head `[H_kv, G]`."""
    num_kv_heads, group_size, _ = queries.shape
    output = torch.empty(queries.shape, dtype=torch.float32)
    for h in range(num_kv_heads):
        for g in range(group_size):
            logits = softmax.scaling * (keys[h].float() @ queries[h, g].float())
            if softmax.softcap:
                logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
            if softmax.sinks is not None:
                logits = torch.cat([logits, softmax.sinks[h, g].float()[None]])
            weights = torch.softmax(logits, dim=0)[: keys.shape[1]]
            output[h, g] = weights @ values[h].float()
    return output


def of_heads(
    queries: Tensor,
    rows: Sequence[tuple[Tensor, Tensor]],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """Dense attention of each head to its own K and V `[n_h, D]` and then the new rows `[H_kv, m, D]`."""
    outputs = []
    for h, (keys, values) in enumerate(rows):
        all_keys = torch.cat([keys.float(), new_keys[h].float()])[None]
        all_values = torch.cat([values.float(), new_values[h].float()])[None]
        outputs.append(dense_decode(queries[h : h + 1], all_keys, all_values, scaling=scaling))
    return torch.cat(outputs)


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
    """As `kernels.pruned_decode`, with K's lost channels as zeros."""
    rows = []
    for head in range(queries.shape[0]):
        whole = torch.zeros(keys.shape[1], queries.shape[2])
        for i, channel in enumerate(channels[head].tolist()):
            whole[:, channel] = keys[head, :, i].float()
        rows.append((whole, values[head]))
    return of_heads(queries, rows, new_keys, new_values, scaling=scaling)


def ragged_decode(
    queries: Tensor,
    head_rows: Sequence[int],
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """As `kernels.ragged_decode`."""
    rows, start = [], 0
    for count in head_rows:
        rows.append((keys[start : start + count], values[start : start + count]))
        start += count
    return of_heads(queries, rows, new_keys, new_values, scaling=scaling)


def trizone_decode(
    queries: Tensor, packed: PackedLayer, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """`softmax(q [K_kept, K_new]^T scaling) [V_kept, V_new]`, all dequantised (RDKV, Eq. 7)."""
    rows = [(keys, values) for keys, values, _ in unpack_layer(packed)]
    return of_heads(queries, rows, new_keys, new_values, scaling=scaling)
