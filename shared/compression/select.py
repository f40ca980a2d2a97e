"""Top-k selection per KV head, exact and deterministic. Knows no method."""

from __future__ import annotations

import torch
from torch import Tensor


def select_rows(scores: Tensor, rows: int) -> Tensor:
    """Positions of the `rows` highest scores of each head; of equal scores the lowest position wins.

    Args: scores float32 `[H_kv, T]`; rows: 1 to T.
    Returns: int32 `[H_kv, rows]`, ascending and unique per head.
    """
    assert 1 <= rows <= scores.shape[1], f"rows is {rows}; it must be 1 to {scores.shape[1]}"
    # torch.topk leaves the order of ties open; a stable sort does not.
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :rows].sort(dim=1).values.to(torch.int32)


def select_ragged_rows(scores: Tensor, head_rows: Tensor) -> tuple[Tensor, Tensor]:
    """As `select_rows`, with a number of rows of its own for each head.

    Args: scores float32 `[H_kv, T]`; head_rows: integers `[H_kv]`, each 0 to T.
    Returns: int64 `[n]` twice: heads in order, and positions, ascending and unique per head.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.arange(scores.shape[1], device=scores.device)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, ranks < head_rows[:, None])
    heads, positions = kept.nonzero(as_tuple=True)
    return heads, positions
