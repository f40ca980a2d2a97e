"""Decode attention where K keeps a few channels of each KV head and V all of them: ThinK.

Called by the decode engine for layers whose prompt has lost K channels; new tokens keep all of theirs. Checks
its arguments and dispatches to an implementation; `reference.py` is the same maths in plain float32.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.dispatch import path_for
from kvferry.kernels.pruned_decode import torch_path


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
    """softmax(scaling * [q_C K^T, q K_new^T]) [V; V_new], q_C the query's kept channels (ThinK, Eq. 6).

    Args:
        queries: `[H_kv, G, D]`.
        channels: integers `[H_kv, C]`, those of the prompt's K, in its order.
        keys: `[H_kv, n, C]`, n >= 0.
        values: `[H_kv, n, D]`.
        new_keys, new_values: `[H_kv, m, D]`, m >= 0, at any strides.
        scaling: the softmax scale, of all D channels.

    Returns: `[H_kv, G, D]` in the queries' dtype.

    Raises: ValueError: shapes or dtypes do not fit together, or there is nothing to attend to.
    """
    _check(queries, channels, keys, values, new_keys, new_values)
    path_for("pruned_decode", queries.device)
    return torch_path.pruned_decode(queries, channels, keys, values, new_keys, new_values, scaling=scaling)


def _check(
    queries: Tensor, channels: Tensor, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor
) -> None:
    num_kv_heads, _, head_dim = queries.shape
    num_rows, num_new = values.shape[1], new_keys.shape[1]
    expected = (
        (num_kv_heads, channels.shape[1]),
        (num_kv_heads, num_rows, channels.shape[1]),
        (num_kv_heads, num_rows, head_dim),
        (num_kv_heads, num_new, head_dim),
        (num_kv_heads, num_new, head_dim),
    )
    shapes = tuple(tuple(t.shape) for t in (channels, keys, values, new_keys, new_values))
    if shapes != expected:
        raise ValueError(f"channels, K, V and new K, V are {shapes}; they must be {expected}")
    dtypes = {t.dtype for t in (queries, keys, values, new_keys, new_values)}
    if len(dtypes) != 1 or not queries.is_floating_point():
        raise ValueError(f"dtypes must be floating and agree: {sorted(map(str, dtypes))}")
    if num_rows + num_new == 0:
        raise ValueError("there is neither a row of the prompt nor a new one; there must be one to attend to")
