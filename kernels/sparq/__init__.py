"""SparQ's decode attention (Ribar et al. 2024): a few channels choose the tokens, the mean value fills in.

Called by the decode engine once per layer and step for layers whose plan says so. The running sum of the
values is built when a transfer commits and grows with each appended row. `reference.py` is the same maths in
plain float32.

Legend: H_kv KV heads, G query heads per KV head, n rows in use, cap rows allocated, D head_dim, r
num_channels, k num_tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dispatch import path_for
from kvferry.kernels.sparq import torch_path
from kvferry.kernels.top_tokens import check_cache


def write_value_sum(values: Tensor, value_sum: Tensor, *, length: int) -> None:
    """Write the sum of the first `length` values.

    Args:
        values: `[H_kv, cap, D]`.
        value_sum: out, float32 `[H_kv, D]`.

    Raises:
        ValueError: shapes or dtypes do not fit together, or length is out of range.
    """
    _check_sum(values, value_sum)
    if not 1 <= length <= values.shape[1]:
        raise ValueError(f"length is {length}; it must be 1 to {values.shape[1]}")
    torch.sum(values[:, :length], dim=1, dtype=torch.float32, out=value_sum)


def append_row(
    keys: Tensor, values: Tensor, value_sum: Tensor, key: Tensor, value: Tensor, *, position: int
) -> None:
    """Write one token's K and V `[H_kv, D]` as row `position` and add the value to the running sum, in place.

    Raises:
        ValueError: shapes or dtypes do not fit together, or position is out of range.
    """
    _check_sum(values, value_sum)
    if keys.shape != values.shape or key.shape != value_sum.shape or value.shape != value_sum.shape:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [H_kv, D] of keys "
            f"{tuple(keys.shape)} and values {tuple(values.shape)}"
        )
    if not 0 <= position < keys.shape[1]:
        raise ValueError(f"position is {position}; it must be 0 to {keys.shape[1] - 1}")
    keys[:, position] = key
    values[:, position] = value
    value_sum += value


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    value_sum: Tensor,
    *,
    length: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """`alpha * attn(q, K[I2], V[I2]) + (1 - alpha) * mean(V)`, I2 chosen per KV head.

    I1 = top-r channels of sum_G |q|; s_g = softmax(scaling * q_g[I1] . K[I1] / sqrt(|q_g[I1]|_1 / |q_g|_1))
    over tokens; I2 = top-k of the mean of s over G; alpha_g = sum of s_g over I2. The lowest index wins ties.
    Up to k rows, all are attended and nothing is filled in. Rows at n and beyond are never read.

    Deviation: selections are per KV head (sums over G), and the newest token is always among the k, where the
    paper keeps a local window. The softmax scale stands for 1/sqrt(D), which it equals in most models.

    Args:
        queries: `[H_kv, G, D]`.
        keys, values: `[H_kv, cap, D]`, the queries' dtype.
        value_sum: float32 `[H_kv, D]`, the sum of the first n values.
        length: n, 1 to cap.
        num_channels: r, 1 to D.
        num_tokens: k, at least 1.
        scaling: the softmax scale.

    Returns:
        `[H_kv, G, D]` in the queries' dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or a size is out of range.
    """
    check_cache(queries, keys, values, length=length, num_tokens=num_tokens)
    _check_sum(values, value_sum)
    if not 1 <= num_channels <= keys.shape[2]:
        raise ValueError(f"num_channels is {num_channels}; it must be 1 to {keys.shape[2]}")
    path_for("sparq", queries.device)
    return torch_path.attend(
        queries,
        keys[:, :length],
        values[:, :length],
        value_sum / length,
        num_channels=num_channels,
        num_tokens=num_tokens,
        scaling=scaling,
    )


def _check_sum(values: Tensor, value_sum: Tensor) -> None:
    if values.ndim != 3 or value_sum.shape != (values.shape[0], values.shape[2]):
        raise ValueError(
            f"value_sum {tuple(value_sum.shape)} must be [H_kv, D] of values {tuple(values.shape)}"
        )
    if value_sum.dtype != torch.float32:
        raise ValueError(f"value_sum is {value_sum.dtype}; it must be float32")
