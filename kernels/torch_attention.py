"""Decode attention in torch: to all rows, and to the best tokens by scores that the sparse ops differ in.

On the CPU, and for calls that no Triton kernel supports. Arguments are checked by the ops.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvferry.kernels.softmax import Scaling, Softmax, attend_softmax

_NEWEST = torch.iinfo(torch.int64).max


def attend_rows(queries: Tensor, keys: Tensor, values: Tensor, *, scaling: Scaling) -> Tensor:
    """Compute softmax(scaling * q K^T) V in the dtype of the inputs, accumulated in float32 by SDPA.

    The G heads of a group become SDPA's query positions: they share one KV head's rows and need no mask, so
    no KV row is repeated G times.

    Args: queries `[H_kv, G, D]`, keys and values `[H_kv, n, D]`. Returns: `[H_kv, G, D]`.
    """
    if isinstance(scaling, Softmax):
        return attend_softmax(queries[:, :, None], keys, values, scaling)[:, :, 0]
    batched = (queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0))
    return scaled_dot_product_attention(*batched, scale=scaling).squeeze(0)


def top_tokens(scores: Tensor, num_tokens: int, *, length: int | None = None, page_size: int = 1) -> Tensor:
    """Find the newest token and the `num_tokens - 1` best others; of equal scores the lowest index wins.

    Args:
        scores: float32 `[H_kv, ceil(n / page_size)]`, at least 0: one per token, or one per page, which all
            its tokens share. The newest token's own score does not count.
        length: n, at least num_tokens; None where every token has a score.

    Returns: int64 `[H_kv, num_tokens]`, in no particular order.
    """
    bits, falling = scores.view(torch.int32).unsqueeze(2), _falling(scores.shape[1], page_size, scores.device)
    keys = torch.add(falling, bits, alpha=1 << 32).flatten(1)
    if length is not None:
        keys = keys[:, :length]
    keys.select(1, -1).fill_(_NEWEST)
    return keys.topk(num_tokens, dim=-1, sorted=False).indices


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Return the best of each row; of equal scores the lowest index wins.

    Args: scores: float32 `[n, m]`, at least 0.
    Returns: int64 `[n, count]`, in no particular order.
    """
    falling = _falling(scores.shape[1], 1, scores.device).view(-1)
    keys = torch.add(falling, scores.view(torch.int32), alpha=1 << 32)
    return keys.topk(count, dim=-1, sorted=False).indices


@functools.lru_cache(maxsize=64)
def _falling(num_pages: int, page_size: int, device: torch.device) -> Tensor:
    """Return int64 `[pages, page_size]`, from the number of tokens less 1 down to 0; all layers share it.

    It is the low half of keys that break ties, which torch.topk leaves undefined; the high half is a score's
    bits, because floats of at least 0 order as their bits do.
    """
    return torch.arange(num_pages * page_size - 1, -1, -1, device=device).view(num_pages, page_size)


@functools.lru_cache(maxsize=256)
def head_starts(num_kv_heads: int, head_rows: int, device: torch.device) -> Tensor:
    """Return int64 `[H_kv, 1]`: each head's first row where heads are `head_rows` rows apart."""
    return torch.arange(0, num_kv_heads * head_rows, head_rows, device=device)[:, None]


def attend_tokens(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    *,
    scaling: Scaling,
    joint: JointRows | None = None,
) -> Tensor:
    """Attend exactly to the selected tokens of each KV head.

    Args: queries `[H_kv, G, D]`, keys and values `[H_kv, n, D]`, tokens int64 `[H_kv, k]`; joint:
        `JointRows.of(keys, values)`, or of a cache that they are the front of, if known already.
    Returns: `[H_kv, G, D]` in the queries' dtype.
    """
    joint = joint or JointRows.of(keys, values)
    if joint is None:
        chosen_keys, chosen_values = (
            rows.gather(1, tokens[:, :, None].expand(-1, -1, rows.shape[2])) for rows in (keys, values)
        )
        return attend_rows(queries, chosen_keys, chosen_values, scaling=scaling)
    chosen = joint.rows.index_select(0, (tokens + joint.starts).view(-1))
    chosen_keys, chosen_values = chosen.view(2, *tokens.shape, keys.shape[2]).unbind(0)
    return attend_rows(queries, chosen_keys, chosen_values, scaling=scaling)


@dataclass(frozen=True, kw_only=True)
class JointRows:
    """K and V of all heads as rows of one tensor, so that one `index_select` copies whole rows of both.

    An index of several parts, such as head and token, would be split again for every element.

    Attributes:
        rows: `[n, D]`.
        starts: int64 `[2, H_kv, 1]`: the first row of each head's keys and values.
    """

    rows: Tensor
    starts: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> JointRows | None:
        """View K and V jointly. Args: keys, values `[H_kv, n, D]`. Returns: None if not evenly spaced in one
        storage."""
        num_kv_heads, num_rows, head_dim = keys.shape
        head_stride, row, one = keys.stride()
        apart = values.storage_offset() - keys.storage_offset()
        together = values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
        together &= (
            values.shape == keys.shape
            and values.stride() == keys.stride()
            and (row, one) == (head_dim, 1)
            and apart >= 0
        )
        if not together or apart % head_dim or head_stride % head_dim:
            return None
        size = (apart + (num_kv_heads - 1) * head_stride) // head_dim + num_rows
        starts = _starts(num_kv_heads, head_stride // head_dim, apart // head_dim, keys.device)
        return cls(rows=keys.as_strided((size, head_dim), (head_dim, 1)), starts=starts)


@functools.lru_cache(maxsize=256)
def _starts(num_kv_heads: int, head_rows: int, value_rows: int, device: torch.device) -> Tensor:
    """Return `JointRows.starts`. Args: value_rows: rows from a head's first key to its first value."""
    keys = head_starts(num_kv_heads, head_rows, device)
    return torch.stack([keys, keys + value_rows])
