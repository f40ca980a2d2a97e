"""Hybrid sparse attention (HSA), RocketKV section 3.4: page extremes, append, attend.

The receiver builds the page extremes of the kept keys when a transfer commits; the decode engine appends one
row and attends once per layer and step. Each function checks its arguments and dispatches to an
implementation; `reference.py` is the same maths in plain float32.

Legend: H_kv KV heads, G query heads per KV head, n rows in use, cap rows allocated, D head_dim, P page_size,
k1 num_channels, k2 num_tokens. Rows at n and beyond, and pages beyond ceil(n / P), are never read: they may
hold anything.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvferry.kernels.descriptors import alignment_problem, shape_problem
from kvferry.kernels.dispatch import path_for
from kvferry.kernels.hsa import torch_path
from kvferry.kernels.hsa.descriptors import MAX_PAGES


def num_pages(length: int, page_size: int) -> int:
    """ceil(length / P)."""
    return -(-length // page_size)


def page_extremes(keys: Tensor, page_max: Tensor, page_min: Tensor, *, length: int, page_size: int) -> None:
    """Write the elementwise extremes of the first `length` keys, page by page; the last may be partial.

    Args:
        keys: `[H_kv, cap, D]`.
        page_max, page_min: out, `[H_kv, ceil(cap / P), D]`, the keys' dtype.
        length: n, 1 to cap.

    Raises:
        ValueError: shapes or dtypes do not fit together, or length is out of range.
    """
    _check_pages(keys, page_max, page_min, length=length, page_size=page_size)
    path_for("hsa_pages", keys.device)
    torch_path.write_page_extremes(keys[:, :length], page_max, page_min, page_size=page_size)


def append_row(
    keys: Tensor,
    values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    position: int,
    page_size: int,
) -> None:
    """Write one token's K and V as row `position` and fold the key into its page's extremes, in place.

    Args:
        keys, values: `[H_kv, cap, D]`.
        page_max, page_min: `[H_kv, ceil(cap / P), D]`, valid for the rows before `position`.
        key, value: `[H_kv, D]`.
        position: the row to write, equal to the rows in use before the call.

    Raises:
        ValueError: shapes or dtypes do not fit together, or position is out of range.
    """
    _check_pages(keys, page_max, page_min, length=position + 1, page_size=page_size)
    if key.shape != (keys.shape[0], keys.shape[2]) or value.shape != key.shape or values.shape != keys.shape:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [H_kv, D] of keys "
            f"{tuple(keys.shape)} and values {tuple(values.shape)}"
        )
    path_for("hsa_pages", keys.device)
    keys[:, position] = key
    values[:, position] = value
    torch_path.update_page_extremes(page_max, page_min, key, position=position, page_size=page_size)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    length: int,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """Attend exactly to the k2 tokens that page extremes rank highest, chosen per KV head (Algorithm 1).

    I1 = top-k1 channels of sum_G |q|; per channel Kmax where sum_G q >= 0, else Kmin; a page's logit of head
    g is q_g . estimate over I1 / sqrt(D |q_I1|_1 / |q|_1); softmax over tokens per head, mean over G, top-k2.
    The lowest index wins ties. Up to k2 rows, all are attended.

    Deviation: the newest token is always among the k2.

    Args:
        queries: `[H_kv, G, D]`.
        keys, values: `[H_kv, cap, D]`, the queries' dtype.
        page_max, page_min: `[H_kv, ceil(cap / P), D]`; the keys where P is 1.
        length: n, rows in use, 1 to cap.
        num_channels: k1, 1 to D.
        num_tokens: k2, at least 1.
        scaling: the softmax scale of the exact attention.

    Returns:
        `[H_kv, G, D]` in the queries' dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or a size is out of range.
    """
    _check_pages(keys, page_max, page_min, length=length, page_size=page_size)
    head_dim = keys.shape[2]
    if queries.ndim != 3 or queries.shape[0] != keys.shape[0] or queries.shape[2] != head_dim:
        raise ValueError(f"queries {tuple(queries.shape)} must be [H_kv, G, D] of keys {tuple(keys.shape)}")
    if values.shape != keys.shape or not queries.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"keys {tuple(keys.shape)} {keys.dtype}, values {tuple(values.shape)} {values.dtype} and queries "
            f"{queries.dtype} must agree"
        )
    if not 1 <= num_channels <= head_dim:
        raise ValueError(f"num_channels is {num_channels}; it must be 1 to {head_dim}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1")
    unsupported = partial(_unsupported, queries, keys, values, page_max, page_min, page_size)
    if path_for("hsa", queries.device, unsupported) != "torch":
        # Here, because a CPU install has no Triton.
        from kvferry.kernels.hsa import triton_kernel

        return triton_kernel.attend(
            queries,
            keys,
            values,
            page_max,
            page_min,
            length=length,
            page_size=page_size,
            num_channels=num_channels,
            num_tokens=num_tokens,
            scaling=scaling,
        )
    pages = num_pages(length, page_size)
    return torch_path.attend(
        queries,
        keys[:, :length],
        values[:, :length],
        page_max[:, :pages],
        page_min[:, :pages],
        page_size=page_size,
        num_channels=num_channels,
        num_tokens=num_tokens,
        scaling=scaling,
    )


def _check_pages(keys: Tensor, page_max: Tensor, page_min: Tensor, *, length: int, page_size: int) -> None:
    if keys.ndim != 3:
        raise ValueError(f"keys {tuple(keys.shape)} must be [H_kv, cap, D]")
    num_kv_heads, capacity, head_dim = keys.shape
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    if not 1 <= length <= capacity:
        raise ValueError(f"length is {length}; it must be 1 to {capacity}")
    expected = (num_kv_heads, num_pages(capacity, page_size), head_dim)
    if page_max.shape != expected or page_min.shape != expected:
        raise ValueError(
            f"page extremes {tuple(page_max.shape)} and {tuple(page_min.shape)} must be {expected}"
        )
    if not keys.dtype == page_max.dtype == page_min.dtype:
        raise ValueError(f"dtypes differ: {keys.dtype}, {page_max.dtype}, {page_min.dtype}")


def _unsupported(
    queries: Tensor, keys: Tensor, values: Tensor, page_max: Tensor, page_min: Tensor, page_size: int
) -> str | None:
    problem = shape_problem(queries.dtype, queries.shape[1], queries.shape[2])
    if problem is None and not keys.stride(1) == values.stride(1) == keys.shape[2]:
        problem = f"rows of keys and values are not {keys.shape[2]} elements apart"
    if problem is None and page_max.stride() != page_min.stride():
        problem = f"page extremes have strides {page_max.stride()} and {page_min.stride()}"
    if problem is None and page_max.shape[1] > MAX_PAGES:
        problem = f"there are {page_max.shape[1]} pages; there must be at most {MAX_PAGES}"
    if problem is None and page_size > 1:
        # read along pages, in pieces of 16 bytes
        problem = alignment_problem(page_max=page_max.mT, page_min=page_min.mT)
    return problem or alignment_problem(keys=keys, values=values)
