"""Dense decode attention: one new token of one sequence and layer attends to every cached row.

Called by the decode engine for layers without sparse attention. `reference.py` is the same maths in plain
float32.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvferry.kernels.checks import attention_problem, check_attention
from kvferry.kernels.dense_decode import torch_path
from kvferry.kernels.dispatch import path_for


def dense_decode(queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
    """softmax(scaling * q K^T) V.

    Args:
        queries: `[H_kv, G, D]`.
        keys, values: `[H_kv, n, D]`, n >= 1, the queries' dtype and device; rows contiguous, heads at any
            stride (a slice of a longer cache).
        scaling: the softmax scale.

    Returns: `[H_kv, G, D]` in the queries' dtype.
    Raises: ValueError: shapes, dtypes, devices or strides do not fit together.
    """
    check_attention(queries, keys, values)
    if keys.stride(2) != 1 or values.stride(2) != 1:
        raise ValueError("rows of keys and values must be contiguous (stride 1 over D)")
    if path_for("dense_decode", queries.device, partial(attention_problem, queries, keys, values)) == "torch":
        return torch_path.dense_decode(queries, keys, values, scaling=scaling)
    # a CPU install has no Triton
    from kvferry.kernels.dense_decode import triton_kernel

    return triton_kernel.dense_decode(queries, keys, values, scaling=scaling)
