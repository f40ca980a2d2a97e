"""Decode attention where every KV head of a layer has a number of rows of its own: AdaKV.

Called by the decode engine for layers whose prompt kept ragged heads. Heads' rows lie one after another,
padded to nothing; rows of new tokens, as many for every head, lie apart. Checks its arguments and dispatches
to an implementation; `reference.py` is the same maths in plain float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvferry.kernels.dispatch import path_for
from kvferry.kernels.ragged_decode import torch_path


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
    """softmax(scaling * q K^T) V of each head over its own rows and the new ones.

    Args:
        queries: `[H_kv, G, D]`.
        head_rows: n_h for each KV head, each at least 0; n is their sum.
        keys, values: `[n, D]`: head 0's rows, head 1's, ...
        new_keys, new_values: `[H_kv, m, D]`, m >= 0, at any strides.
        scaling: the softmax scale.

    Returns: `[H_kv, G, D]` in the queries' dtype.

    Raises: ValueError: shapes or dtypes do not fit together, or a head has nothing to attend to.
    """
    _check(queries, head_rows, keys, values, new_keys, new_values)
    path_for("ragged_decode", queries.device)
    return torch_path.ragged_decode(queries, head_rows, keys, values, new_keys, new_values, scaling=scaling)


def _check(
    queries: Tensor,
    head_rows: Sequence[int],
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
) -> None:
    num_kv_heads, _, head_dim = queries.shape
    rows, new = (sum(head_rows), head_dim), (num_kv_heads, new_keys.shape[1], head_dim)
    shapes = tuple(tuple(t.shape) for t in (keys, values, new_keys, new_values))
    if len(head_rows) != num_kv_heads or min(head_rows) < 0 or shapes != (rows, rows, new, new):
        raise ValueError(
            f"K, V and new K, V are {shapes}, rows of each head {list(head_rows)}; they must be "
            f"{(rows, rows, new, new)} for {num_kv_heads} heads"
        )
    dtypes = {t.dtype for t in (queries, keys, values, new_keys, new_values)}
    if len(dtypes) != 1 or not queries.is_floating_point():
        raise ValueError(f"dtypes must be floating and agree: {sorted(map(str, dtypes))}")
    if min(head_rows) + new_keys.shape[1] == 0:
        raise ValueError("a head has neither a row of the prompt nor a new one; it must have one")
