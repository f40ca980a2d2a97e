"""The last two steps of every sparse decode attention here: choose the best tokens, attend exactly to them.

Used by the torch paths of `exact_topk`, `hsa`, `quest` and `sparq`, which differ in how they score tokens.
Checks nothing: arguments come from those dispatches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.torch_path import dense_decode


def top_tokens(scores: Tensor, num_tokens: int) -> Tensor:
    """The newest token and the `num_tokens - 1` best of the others; of equal scores the lowest index wins.

    Args: scores float32 `[H_kv, n]`, at least 0, n >= num_tokens; the newest token's own does not count.
    Returns: int64 `[H_kv, num_tokens]`, the newest first, then by falling score.
    """
    # torch.topk leaves the order of ties open, so no two keys are equal: floats of at least 0 order as their
    # bits do, and of equal ones the lower index has the higher key
    indices = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    keys = (scores.view(torch.int32).long() << 32) | indices
    keys[:, -1] = torch.iinfo(torch.int64).max
    return keys.topk(num_tokens, dim=-1).indices


def attend_tokens(queries: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, *, scaling: float) -> Tensor:
    """Exact attention to the chosen tokens of each KV head.

    Args: queries `[H_kv, G, D]`, keys and values `[H_kv, n, D]`, tokens int64 `[H_kv, k]`.
    Returns: `[H_kv, G, D]` in the queries' dtype.
    """
    return dense_decode(queries, _gather_rows(keys, tokens), _gather_rows(values, tokens), scaling=scaling)


def _gather_rows(rows: Tensor, tokens: Tensor) -> Tensor:
    """Each head's chosen rows, copied whole. Args: rows `[H_kv, n, D]`; tokens int64 `[H_kv, k]`.

    Returns: `[H_kv, k, D]`.
    """
    num_kv_heads, num_rows, head_dim = rows.shape
    if rows.stride(2) != 1 or rows.stride(1) != head_dim or rows.stride(0) % head_dim:
        rows = rows.contiguous()
    rows_apart = rows.stride(0) // head_dim
    # one index into all heads' rows: an index of two parts is taken apart again for every element
    flat = rows.as_strided(((num_kv_heads - 1) * rows_apart + num_rows, head_dim), (head_dim, 1))
    starts = torch.arange(0, num_kv_heads * rows_apart, rows_apart, device=rows.device)
    return flat.index_select(0, (tokens + starts[:, None]).flatten()).view(num_kv_heads, -1, head_dim)


def check_cache(queries: Tensor, keys: Tensor, values: Tensor, *, length: int, num_tokens: int) -> None:
    """Raises ValueError where queries `[H_kv, G, D]` and a cache `[H_kv, cap, D]` do not fit together, or a
    size is out of range."""
    if keys.ndim != 3 or values.shape != keys.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must both be [H_kv, cap, D]"
        )
    if queries.ndim != 3 or queries.shape[0] != keys.shape[0] or queries.shape[2] != keys.shape[2]:
        raise ValueError(f"queries {tuple(queries.shape)} must be [H_kv, G, D] of keys {tuple(keys.shape)}")
    if not queries.dtype == keys.dtype == values.dtype:
        raise ValueError(f"dtypes must agree: {queries.dtype}, {keys.dtype}, {values.dtype}")
    if not queries.device == keys.device == values.device:
        raise ValueError(f"devices must agree: {queries.device}, {keys.device}, {values.device}")
    if not 1 <= length <= keys.shape[1]:
        raise ValueError(f"length is {length}; it must be 1 to {keys.shape[1]}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1")
