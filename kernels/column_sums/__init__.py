"""Column sums: how much all of a prompt's queries attend to each token, and how unevenly.

D2O's and H2O's accumulated attention score, called once a layer while the prompt is prefilled; the variances
are what D2O's layer budgets are made of. Never holds a T x T matrix: at most `MAX_LOGITS` float32 logits are
alive at a time. `window_scores` is the same for the last W queries alone. Does not select.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvferry.kernels.column_sums.torch_path import column_sums_torch
from kvferry.kernels.descriptors import alignment_problem, shape_problem
from kvferry.kernels.dispatch import path_for


class ColumnSums(NamedTuple):
    """Accumulated attention of one layer.

    Attributes:
        sums: float32 `[H_kv, T]`, over queries and over the group's query heads.
        variances: float32 `[H_kv, G]`, of each query head's own column sums over the T columns (population
            variance: one column has none).
    """

    sums: Tensor
    variances: Tensor


def column_sums(queries: Tensor, keys: Tensor, *, scaling: float) -> ColumnSums:
    """`c_{g,t} = sum_i softmax(q_{g,i} K^T * scaling)_t`, causal; `sums_t = sum_g c_{g,t}` (D2O, Eq. 6) and
    `variances_g = Var_t(c_{g,t})` (D2O, Eq. 4).

    Args:
        queries: post-RoPE `[H_kv, G, T_new, D]`; query i sits at position T - T_new + i and sees no later
            token. T_new == T for a first turn; with history the older queries are gone and sum to nothing.
        keys: post-RoPE `[H_kv, T, D]`, T >= T_new >= 1, same dtype and device as `queries`.
        scaling: softmax scale.

    Returns: each row of `sums` sums to G * T_new.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    if queries.ndim != 4 or keys.ndim != 3:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "expected [H_kv, G, T_new, D] and [H_kv, T, D]"
        )
    num_kv_heads, _, num_queries, head_dim = queries.shape
    if keys.shape[0] != num_kv_heads or keys.shape[2] != head_dim:
        raise ValueError(
            f"keys have shape {tuple(keys.shape)}; expected [{num_kv_heads}, T, {head_dim}] to match queries"
        )
    if not 1 <= num_queries <= keys.shape[1]:
        raise ValueError(f"there are {num_queries} queries; there must be 1 to {keys.shape[1]} (T)")
    if queries.dtype != keys.dtype or queries.device != keys.device:
        raise ValueError(
            f"queries are {queries.dtype} on {queries.device}, keys {keys.dtype} on {keys.device}; "
            "they must agree"
        )
    if path_for("column_sums", keys.device, _unsupported(queries, keys)) != "torch":
        # Here, because a CPU install has no Triton.
        from kvferry.kernels.column_sums import triton_kernel

        return ColumnSums(*triton_kernel.column_sums(queries, keys, scaling=scaling))
    return ColumnSums(*column_sums_torch(queries, keys, scaling))


def _unsupported(queries: Tensor, keys: Tensor) -> str | None:
    problem = shape_problem(queries.dtype, 1, queries.shape[3])
    return problem or alignment_problem(keys=keys)
