"""Hybrid sparse attention (HSA), RocketKV section 3.4: page extremes, append, attend.

The receiver builds the page extremes of the received keys when a transfer commits; the decode engine appends
one row and attends once per layer and step.

Legend, beside that of `kernels`: P page_size, k1 num_channels, k2 num_tokens. Pages beyond ceil(n / P) are
never read and may have any content.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.dispatch import (
    alignment_problem,
    attention_problem,
    check_attention,
    check_same_kind,
    check_size,
    path_for,
    run,
)
from kvferry.kernels.hsa import torch_path
from kvferry.kernels.softmax import Scaling

MAX_PAGES = 8192
"""Pages of one head that a kernel can choose from: one program chooses among all of them."""


def num_pages(length: int, page_size: int) -> int:
    """Count the pages of so many rows, the last of which may be partial."""
    return -(-length // page_size)


def update_page_extremes(
    page_max: Tensor, page_min: Tensor, key: Tensor, *, position: int, page_size: int
) -> None:
    """Fold one new row into its page; the first row of a page starts it.

    Args:
        page_max, page_min: `[H_kv, ceil(cap / P), D]`, valid for the rows before `position`.
        key: `[H_kv, D]`.
    """
    page = position // page_size
    highest, lowest = page_max.select(1, page), page_min.select(1, page)
    if position % page_size == 0:
        highest.copy_(key)
        lowest.copy_(key)
    else:
        torch.maximum(highest, key, out=highest)
        torch.minimum(lowest, key, out=lowest)


def page_extremes(keys: Tensor, page_max: Tensor, page_min: Tensor, *, length: int, page_size: int) -> None:
    """Write the elementwise extremes of the first `length` keys, page by page; the last may be partial.

    Args:
        keys: `[H_kv, cap, D]`.
        page_max, page_min: out, `[H_kv, ceil(cap / P), D]`, the keys' dtype.
        length: n, 1 to cap.

    Raises:
        ValueError: shapes or dtypes do not fit together, or length is out of range.
    """
    check_pages(keys, page_max, page_min, length=length, page_size=page_size)
    path_for("hsa_pages", keys.device)
    num_kv_heads, _, head_dim = keys.shape
    num_full = length // page_size
    pages = keys[:, : num_full * page_size].reshape(num_kv_heads, num_full, page_size, head_dim)
    torch.amax(pages, dim=2, out=page_max[:, :num_full])
    torch.amin(pages, dim=2, out=page_min[:, :num_full])
    if length % page_size:
        rest = keys[:, num_full * page_size : length]
        page_max[:, num_full] = rest.amax(1)
        page_min[:, num_full] = rest.amin(1)


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
    scaling: Scaling,
) -> Tensor:
    """Attend exactly to the k2 tokens that page extremes rank highest, chosen per KV head (Algorithm 1).

    I1 = top-k1 channels of sum_G |q|; per channel Kmax where sum_G q >= 0, else Kmin; a page's logit of head
    g is scaling * q_g . estimate over I1 / sqrt(|q_I1|_1 / |q|_1); softmax over tokens per head, mean over G,
    top-k2.

    Deviation: the paper has 1/sqrt(D) for scaling, which it equals in most models.

    Args: as in `kernels`.
        page_max, page_min: `[H_kv, ceil(cap / P), D]`; the keys where P is 1.
        num_channels: k1, 1 to D.
    """
    check_attention(queries, keys, values)
    check_pages(keys, page_max, page_min, length=length, page_size=page_size)
    check_size("num_channels", num_channels, 1, keys.shape[2])
    check_size("num_tokens", num_tokens, 1)
    unsupported = partial(_unsupported, queries, keys, values, page_max, page_min, page_size)
    cache = keys[:, :length], values[:, :length], page_max, page_min
    sizes: dict[str, Any] = {"page_size": page_size, "num_channels": num_channels, "num_tokens": num_tokens}
    in_torch = partial(torch_path.attend, queries, *cache, **sizes, scaling=scaling)
    return run("hsa", queries.device, "hsa.triton_kernel.attend", in_torch, unsupported)


def check_pages(keys: Tensor, page_max: Tensor, page_min: Tensor, *, length: int, page_size: int) -> None:
    """Require page extremes `[H_kv, ceil(cap / P), D]` of keys `[H_kv, cap, D]`, and sizes in range."""
    if keys.ndim != 3:
        raise ValueError(f"keys {tuple(keys.shape)} must be [H_kv, cap, D]")
    num_kv_heads, capacity, head_dim = keys.shape
    check_size("page_size", page_size, 1)
    check_size("length", length, 1, capacity)
    expected = (num_kv_heads, num_pages(capacity, page_size), head_dim)
    if page_max.shape != expected or page_min.shape != expected:
        raise ValueError(
            f"page extremes {tuple(page_max.shape)} and {tuple(page_min.shape)} must be {expected}"
        )
    check_same_kind(keys=keys, page_max=page_max, page_min=page_min)


def _unsupported(
    queries: Tensor, keys: Tensor, values: Tensor, page_max: Tensor, page_min: Tensor, page_size: int
) -> str | None:
    problem = attention_problem(queries, keys, values)
    if problem is None and not keys.stride(1) == values.stride(1) == keys.shape[2]:
        problem = f"rows of keys and values are not {keys.shape[2]} elements apart"
    if problem is None and page_max.stride() != page_min.stride():
        problem = f"page extremes have strides {page_max.stride()} and {page_min.stride()}"
    if problem is None and page_max.shape[1] > MAX_PAGES:
        problem = f"there are {page_max.shape[1]} pages; there must be at most {MAX_PAGES}"
    if problem is None and page_size > 1:
        # read along pages, 16 bytes at a time
        problem = alignment_problem(page_max=page_max.mT, page_min=page_min.mT)
    return problem
