"""Quest's decode attention (Tang et al. 2024): upper bounds of whole pages choose the tokens to attend.

Called by the decode engine once per layer and step for layers whose plan says so. Pages are built and grown
by `kernels.hsa` (`page_extremes`, `append_row`): the auxiliary tensors are the same. `reference.py` is the
same maths in plain float32.

Legend: H_kv KV heads, G query heads per KV head, n rows in use, cap rows allocated, D head_dim, P page_size.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.dispatch import path_for
from kvferry.kernels.hsa import num_pages
from kvferry.kernels.quest import torch_path
from kvferry.kernels.top_tokens import check_cache


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    length: int,
    page_size: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """Attend exactly to the k tokens whose pages have the highest upper bounds, chosen per KV head.

    A page's logit of head g is `scaling * sum_d max(q_gd Kmax_d, q_gd Kmin_d)`, over all channels; softmax
    over tokens per head (a page's logit stands for each of its tokens), mean over G, top-k. The lowest index
    wins ties. Up to k rows, all are attended. Rows at n and beyond, and pages beyond ceil(n / P), are never
    read.

    Deviation: the newest token is always among the k. Whole pages are not forced: where k is no multiple of P
    the last chosen page is cut, so that the budget holds to the token.

    Args:
        queries: `[H_kv, G, D]`.
        keys, values: `[H_kv, cap, D]`, the queries' dtype.
        page_max, page_min: `[H_kv, ceil(cap / P), D]`, the keys' dtype.
        length: n, 1 to cap.
        page_size: P, at least 1.
        num_tokens: k, at least 1.
        scaling: the softmax scale, of the bounds and of the exact attention.

    Returns:
        `[H_kv, G, D]` in the queries' dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or a size is out of range.
    """
    check_cache(queries, keys, values, length=length, num_tokens=num_tokens)
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    expected = (keys.shape[0], num_pages(keys.shape[1], page_size), keys.shape[2])
    if page_max.shape != expected or page_min.shape != expected:
        raise ValueError(
            f"page extremes {tuple(page_max.shape)} and {tuple(page_min.shape)} must be {expected}"
        )
    pages = num_pages(length, page_size)
    path_for("quest", queries.device)
    return torch_path.attend(
        queries,
        keys[:, :length],
        values[:, :length],
        page_max[:, :pages],
        page_min[:, :pages],
        page_size=page_size,
        num_tokens=num_tokens,
        scaling=scaling,
    )
