"""The last two steps of every sparse decode attention here: choose the best tokens, attend exactly to them.

Used by the torch paths of `exact_topk`, `hsa`, `quest` and `sparq`, which differ in how they score tokens.
Checks nothing: arguments come from those dispatches.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.torch_path import dense_decode

_NEWEST = torch.iinfo(torch.int64).max


def top_tokens(scores: Tensor, num_tokens: int, *, length: int | None = None, page_size: int = 1) -> Tensor:
    """The newest token and the `num_tokens - 1` best of the others; of equal scores the lowest index wins.

    Args:
        scores: float32 `[H_kv, ceil(n / page_size)]`, at least 0: of every token, or of pages, whose tokens
            share it; the newest token's own does not count.
        length: n, at least num_tokens; not needed where every token has a score.

    Returns: int64 `[H_kv, num_tokens]`, the newest first, then by falling score.
    """
    # torch.topk leaves the order of ties open, so no two keys are equal: floats of at least 0 order as their
    # bits do, and of equal ones the lower index has the higher key
    bits = scores.view(torch.int32)[:, :, None]
    keys = torch.add(_falling(scores.shape[1], page_size, scores.device), bits, alpha=1 << 32).flatten(1)
    if length is not None:
        keys = keys[:, :length]
    keys[:, -1] = _NEWEST
    return keys.topk(num_tokens, dim=-1).indices


@functools.lru_cache(maxsize=64)
def _falling(num_pages: int, page_size: int, device: torch.device) -> Tensor:
    """int64 `[pages, page_size]`, one less from token to token and the last one's 0; layers share it."""
    return torch.arange(num_pages * page_size - 1, -1, -1, device=device).view(num_pages, page_size)


@functools.lru_cache(maxsize=256)
def head_starts(num_kv_heads: int, apart: int, device: torch.device) -> Tensor:
    """int64 `[H_kv, 1]`: the row that each head's rows begin at where heads are so many rows apart."""
    return torch.arange(0, num_kv_heads * apart, apart, device=device)[:, None]


def attend_tokens(queries: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, *, scaling: float) -> Tensor:
    """Exact attention to the chosen tokens of each KV head.

    Args: queries `[H_kv, G, D]`, keys and values `[H_kv, n, D]`, tokens int64 `[H_kv, k]`.
    Returns: `[H_kv, G, D]` in the queries' dtype.
    """
    chosen_keys, chosen_values = _gather_rows(keys, values, tokens)
    return dense_decode(queries, chosen_keys, chosen_values, scaling=scaling)


def _gather_rows(keys: Tensor, values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's chosen rows, copied whole: `[H_kv, k, D]` each. Args: as `attend_tokens`.

    Where they lie together, by one index into all rows of both: an index of several parts is taken apart
    again for every element.
    """
    num_kv_heads, num_rows, head_dim = keys.shape
    head_stride, row, one = keys.stride()
    apart = values.storage_offset() - keys.storage_offset()
    together = values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    together &= values.stride() == keys.stride() and (row, one) == (head_dim, 1) and apart >= 0
    if not together or apart % head_dim or head_stride % head_dim:
        wide = tokens[:, :, None].expand(-1, -1, head_dim)
        return keys.gather(1, wide), values.gather(1, wide)
    size = (apart + (num_kv_heads - 1) * head_stride) // head_dim + num_rows
    rows = keys.as_strided((size, head_dim), (head_dim, 1))
    starts = _starts(num_kv_heads, head_stride // head_dim, apart // head_dim, keys.device)
    chosen = rows.index_select(0, (tokens + starts).flatten()).view(2, *tokens.shape, head_dim)
    return chosen[0], chosen[1]


@functools.lru_cache(maxsize=256)
def _starts(num_kv_heads: int, heads_apart: int, values_apart: int, device: torch.device) -> Tensor:
    """int64 `[2, H_kv, 1]`: the rows that each head's keys and values begin at."""
    keys = head_starts(num_kv_heads, heads_apart, device)
    return torch.stack([keys, keys + values_apart])


def check_cache(queries: Tensor, keys: Tensor, values: Tensor, *, length: int, num_tokens: int) -> None:
    """Raises ValueError where queries `[H_kv, G, D]` and a cache `[H_kv, cap, D]` do not fit together, or a
    size is out of range."""
    if keys.ndim != 3 or values.shape != keys.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must both be [H_kv, cap, D]"
        )
    if queries.ndim != 3 or queries.shape[0] != keys.shape[0] or queries.shape[2] != keys.shape[2]:
        raise ValueError(f"queries {tuple(queries.shape)} must be [H_kv, G, D] of keys {tuple(keys.shape)}")
    if not queries.dtype == keys.dtype == values.dtype:
        raise ValueError(f"dtypes must agree: {queries.dtype}, {keys.dtype}, {values.dtype}")
    if not queries.device == keys.device == values.device:
        raise ValueError(f"devices must agree: {queries.device}, {keys.device}, {values.device}")
    if not 1 <= length <= keys.shape[1]:
        raise ValueError(f"length is {length}; it must be 1 to {keys.shape[1]}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1")
