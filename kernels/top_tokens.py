"""The last two steps of every sparse decode attention here: choose the best tokens, attend exactly to them.

Used by the torch paths of `exact_topk`, `hsa`, `quest` and `sparq`, which differ in how they score tokens.
Checks nothing: arguments come from those dispatches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

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

    Returns: int64 `[H_kv, num_tokens]`, in no particular order.
    """
    keys = _distinct_keys(scores, page_size)
    if length is not None:
        keys = keys[:, :length]
    keys.select(1, -1).fill_(_NEWEST)
    return keys.topk(num_tokens, dim=-1, sorted=False).indices


def top_indices(scores: Tensor, count: int) -> Tensor:
    """The best of each row; of equal scores the lowest index wins.

    Args: scores: float32 `[n, m]`, at least 0.
    Returns: int64 `[n, count]`, in no particular order.
    """
    return _distinct_keys(scores, 1).topk(count, dim=-1, sorted=False).indices


def _distinct_keys(scores: Tensor, page_size: int) -> Tensor:
    """int64 `[n, m * page_size]` that order as scores do. Args: scores: as of `top_tokens`.

    torch.topk leaves the order of ties open, so no two keys are equal: floats of at least 0 order as their
    bits do, and of equal ones the lower index has the higher key.
    """
    bits = scores.view(torch.int32).unsqueeze(2)
    return torch.add(_falling(scores.shape[1], page_size, scores.device), bits, alpha=1 << 32).flatten(1)


@functools.lru_cache(maxsize=64)
def _falling(num_pages: int, page_size: int, device: torch.device) -> Tensor:
    """int64 `[pages, page_size]`, one less from token to token and the last one's 0; layers share it."""
    return torch.arange(num_pages * page_size - 1, -1, -1, device=device).view(num_pages, page_size)


@functools.lru_cache(maxsize=256)
def head_starts(num_kv_heads: int, apart: int, device: torch.device) -> Tensor:
    """int64 `[H_kv, 1]`: the row that each head's rows begin at where heads are so many rows apart."""
    return torch.arange(0, num_kv_heads * apart, apart, device=device)[:, None]


def attend_tokens(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    *,
    scaling: float,
    joint: JointRows | None = None,
) -> Tensor:
    """Exact attention to the chosen tokens of each KV head.

    Args: queries `[H_kv, G, D]`, keys and values `[H_kv, n, D]`, tokens int64 `[H_kv, k]`; joint: keys and
    values as rows of one tensor, if that is known already.
    Returns: `[H_kv, G, D]` in the queries' dtype.
    """
    joint = joint or JointRows.of(keys, values)
    if joint is None:
        wide = tokens[:, :, None].expand(-1, -1, keys.shape[2])
        chosen_keys, chosen_values = keys.gather(1, wide), values.gather(1, wide)
    else:
        chosen_keys, chosen_values = joint.gather(tokens)
    return dense_decode(queries, chosen_keys, chosen_values, scaling=scaling)


@dataclass(frozen=True, kw_only=True)
class JointRows:
    """K and V of all heads as rows of one tensor: an index of several parts, such as a head and a token, is
    taken apart again for every element.

    Attributes:
        rows: `[n, D]`.
        starts: int64 `[2, H_kv, 1]`: the rows that each head's keys and values begin at.
    """

    rows: Tensor
    starts: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> JointRows | None:
        """Args: keys, values `[H_kv, n, D]`. Returns: None where they do not lie in one storage so."""
        num_kv_heads, num_rows, head_dim = keys.shape
        head_stride, row, one = keys.stride()
        apart = values.storage_offset() - keys.storage_offset()
        together = values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
        together &= values.stride() == keys.stride() and (row, one) == (head_dim, 1) and apart >= 0
        if not together or apart % head_dim or head_stride % head_dim:
            return None
        size = (apart + (num_kv_heads - 1) * head_stride) // head_dim + num_rows
        starts = _starts(num_kv_heads, head_stride // head_dim, apart // head_dim, keys.device)
        return cls(rows=keys.as_strided((size, head_dim), (head_dim, 1)), starts=starts)

    def gather(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Each head's chosen rows, copied whole: `[H_kv, k, D]` each. Args: tokens int64 `[H_kv, k]`."""
        chosen = self.rows.index_select(0, (tokens + self.starts).view(-1))
        keys, values = chosen.view(2, *tokens.shape, self.rows.shape[1]).unbind(0)
        return keys, values


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
