"""Hybrid sparse attention over packed K and V: RDKV's storage with the traffic of RocketKV's second stage.

A packed layer's tokens lie in packed order, head by head, as many as each head kept; new tokens follow as
rows. Pages run over both, one head's page tensor as long as its own tokens need. The receiver builds the page
extremes from the packed keys; the decode engine appends one row and attends once per layer and step: the
extremes choose the tokens (`kernels/hsa`), and only those tokens' codes are read.

Legend: H_kv KV heads, G query heads per KV head, n_h tokens that head h kept, m new rows, cap rows allocated,
D head_dim, P page_size, k1 num_channels, k2 num_tokens.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.dispatch import path_for
from kvferry.kernels.hsa import num_pages
from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.packed_hsa import torch_path


def page_extremes(packed: PackedLayer, page_max: Tensor, page_min: Tensor, *, page_size: int) -> None:
    """Write the extremes of the dequantised keys of each head's tokens, page by page.

    A page's extremes are those of the keys that attention reads, not of the keys before quantisation.

    Args:
        page_max, page_min: out, floating `[H_kv, pages, D]`, pages >= ceil(n_h / P) for every head.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check_pages(packed, page_max, page_min, num_new=0, page_size=page_size)
    torch_path.write_page_extremes(packed, page_max, page_min, page_size=page_size)


def append_key(
    packed: PackedLayer, page_max: Tensor, page_min: Tensor, key: Tensor, *, num_new: int, page_size: int
) -> None:
    """Fold one new token's key into its page of each head, in place.

    Args:
        page_max, page_min: `[H_kv, pages, D]`, valid for n_h + num_new tokens.
        key: `[H_kv, D]`.
        num_new: new rows before this one.

    Raises:
        ValueError: shapes do not fit together, or the pages are full.
    """
    _check_pages(packed, page_max, page_min, num_new=num_new + 1, page_size=page_size)
    if key.shape != (page_max.shape[0], page_max.shape[2]):
        raise ValueError(f"key {tuple(key.shape)} must be [H_kv, D] of pages {tuple(page_max.shape)}")
    torch_path.append_key(packed, page_max, page_min, key, num_new=num_new, page_size=page_size)


def attend(
    queries: Tensor,
    packed: PackedLayer,
    new_keys: Tensor,
    new_values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """`hsa.attend` over each head's kept tokens, dequantised, followed by the new rows.

    Args:
        queries: `[H_kv, G, D]`.
        new_keys, new_values: `[H_kv, m, D]`, m >= 1, the queries' dtype: the rows in use, the newest last.
        page_max, page_min: `[H_kv, pages, D]`, valid for n_h + m tokens.
        num_channels: k1, 1 to D.
        num_tokens: k2, at least 1.
        scaling: the softmax scale of the exact attention.

    Returns:
        `[H_kv, G, D]` in the queries' dtype; accumulated in float32.

    Raises:
        ValueError: shapes or dtypes do not fit together, or a size is out of range.
    """
    _check_pages(packed, page_max, page_min, num_new=new_keys.shape[1], page_size=page_size)
    num_kv_heads, _, head_dim = page_max.shape
    if queries.ndim != 3 or queries.shape[0] != num_kv_heads or queries.shape[2] != head_dim:
        raise ValueError(
            f"queries {tuple(queries.shape)} must be [H_kv, G, D] of pages {tuple(page_max.shape)}"
        )
    if new_keys.shape != new_values.shape or new_keys.shape[0] != num_kv_heads or new_keys.shape[1] < 1:
        raise ValueError(
            f"new_keys {tuple(new_keys.shape)} and new_values {tuple(new_values.shape)} must be [H_kv, m, D] "
            "alike, with at least one row"
        )
    if not queries.dtype == new_keys.dtype == new_values.dtype:
        raise ValueError(f"dtypes differ: {queries.dtype}, {new_keys.dtype}, {new_values.dtype}")
    if not 1 <= num_channels <= head_dim:
        raise ValueError(f"num_channels is {num_channels}; it must be 1 to {head_dim}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1")
    path_for("packed_hsa", queries.device)
    return torch_path.attend(
        queries,
        packed,
        new_keys,
        new_values,
        page_max,
        page_min,
        page_size=page_size,
        num_channels=num_channels,
        num_tokens=num_tokens,
        scaling=scaling,
    )


def _check_pages(
    packed: PackedLayer, page_max: Tensor, page_min: Tensor, *, num_new: int, page_size: int
) -> None:
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    most = max(head.counts.num_tokens for head in packed.heads) + num_new
    fits = page_max.ndim == 3 and page_max.shape[0] == len(packed.heads)
    if not fits or page_max.shape != page_min.shape or page_max.shape[2] != packed.layout.head_dim:
        raise ValueError(
            f"page extremes {tuple(page_max.shape)} and {tuple(page_min.shape)} must both be "
            f"[{len(packed.heads)}, pages, {packed.layout.head_dim}]"
        )
    if page_max.shape[1] < num_pages(most, page_size):
        raise ValueError(
            f"{most} tokens need {num_pages(most, page_size)} pages; there are {page_max.shape[1]}"
        )
