"""Dense decode attention: one new token of one sequence and layer attends to every cached row.

Called by the decode engine for layers whose plan has no hybrid sparse attention. Checks its arguments and
dispatches to an implementation; `reference.py` is the same maths in plain float32.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvferry.kernels.dense_decode import torch_path
from kvferry.kernels.descriptors import alignment_problem, shape_problem
from kvferry.kernels.dispatch import path_for


def dense_decode(queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
    """softmax(scaling * q K^T) V.

    Args:
        queries: `[H_kv, G, D]`.
        keys, values: `[H_kv, n, D]`, n >= 1, the queries' dtype and device; rows contiguous, heads at any
            stride (a slice of a longer cache).
        scaling: the softmax scale.

    Returns:
        `[H_kv, G, D]` in the queries' dtype.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit together.
    """
    _check(queries, keys, values)
    if path_for("dense_decode", queries.device, partial(_unsupported, queries, keys, values)) == "torch":
        return torch_path.dense_decode(queries, keys, values, scaling=scaling)
    # Here, because a CPU install has no Triton.
    from kvferry.kernels.dense_decode import triton_kernel

    return triton_kernel.dense_decode(queries, keys, values, scaling=scaling)


def _unsupported(queries: Tensor, keys: Tensor, values: Tensor) -> str | None:
    problem = shape_problem(queries.dtype, queries.shape[1], queries.shape[2])
    if problem is None and keys.stride(1) != values.stride(1):
        problem = f"rows of keys are {keys.stride(1)} elements apart and those of values {values.stride(1)}"
    return problem or alignment_problem(keys=keys, values=values)


def _check(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    if queries.ndim != 3 or keys.ndim != 3 or keys.shape != values.shape:
        raise ValueError(
            f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} must "
            "be [H_kv, G, D], [H_kv, n, D] and [H_kv, n, D]"
        )
    if keys.shape[0] != queries.shape[0] or keys.shape[2] != queries.shape[2] or keys.shape[1] < 1:
        raise ValueError(
            f"keys {tuple(keys.shape)} do not fit queries {tuple(queries.shape)}: same H_kv and D, n >= 1"
        )
    if not queries.dtype == keys.dtype == values.dtype:
        raise ValueError(f"dtypes differ: {queries.dtype}, {keys.dtype}, {values.dtype}")
    if not queries.device == keys.device == values.device:
        raise ValueError(f"devices differ: {queries.device}, {keys.device}, {values.device}")
    if keys.stride(2) != 1 or values.stride(2) != 1:
        raise ValueError("rows of keys and values must be contiguous (stride 1 over D)")
