"""Window scores: how much the prompt's last queries attend to each token, summed over window and group.

First step of SnapKV's and RocketKV's scoring, called once a layer while the prompt is prefilled. Does not
pool, does not select, and does not drop the window's own columns. The torch path holds at most `MAX_LOGITS`
float32 logits at a time, however long the prompt is; the Triton kernel none.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.descriptors import alignment_problem, shape_problem
from kvferry.kernels.dispatch import path_for
from kvferry.kernels.window_scores.torch_path import window_scores_torch


def window_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """Column sums of the window's causal attention: `s_t = sum_{g, i} softmax(q_{g,i} K^T * scaling)_t`.

    Args:
        queries: post-RoPE `[H_kv, G, W, D]`; query i sits at position T - W + i and sees no later token.
        keys: post-RoPE `[H_kv, T, D]`, T >= W >= 1, same dtype and device as `queries`.
        scaling: softmax scale.

    Returns: float32 `[H_kv, T]`; each row sums to G * W.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    if queries.ndim != 4 or keys.ndim != 3:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "expected [H_kv, G, W, D] and [H_kv, T, D]"
        )
    num_kv_heads, _, window, head_dim = queries.shape
    if keys.shape[0] != num_kv_heads or keys.shape[2] != head_dim:
        raise ValueError(
            f"keys have shape {tuple(keys.shape)}; expected [{num_kv_heads}, T, {head_dim}] to match queries"
        )
    if not 1 <= window <= keys.shape[1]:
        raise ValueError(f"the window has {window} queries; it must have 1 to {keys.shape[1]} (T)")
    if queries.dtype != keys.dtype or queries.device != keys.device:
        raise ValueError(
            f"queries are {queries.dtype} on {queries.device}, keys {keys.dtype} on {keys.device}; "
            "they must agree"
        )
    if path_for("window_scores", keys.device, _unsupported(queries, keys)) != "torch":
        # Here, because a CPU install has no Triton.
        from kvferry.kernels.window_scores import triton_kernel

        return triton_kernel.window_scores(queries, keys, scaling=scaling)
    return window_scores_torch(queries, keys, scaling)


def _unsupported(queries: Tensor, keys: Tensor) -> str | None:
    problem = shape_problem(queries.dtype, 1, queries.shape[3])
    return problem or alignment_problem(keys=keys)
