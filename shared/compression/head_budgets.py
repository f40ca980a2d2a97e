"""Divides a layer's rows among its KV heads by their scores: AdaKV (Feng et al. 2024).

Called after a scorer and before a selection with different numbers of rows per head. It neither scores nor
selects.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

FLOOR = 0.2


def head_budgets(scores: Tensor, *, rows: int, window: int, floor: float = FLOOR) -> Tensor:
    """Split a layer's H_kv * B rows over its heads as one top-k over all heads would.

    Every head gets the window and its own best `floor(f (B - W))` rows, f being `floor`. The rest of the
    H_kv (B - W) rows go to the highest remaining scores of all heads. Among equal scores the lowest
    (head, position) wins, so that `select_rows` selects the same tokens with a head's budget.

    Deviation: the paper takes 0.8 of each head's share of a plain top-k plus 0.2 of B - W, rounded. A floor
    of 0.2 (as in kvpress, which however includes the window) needs no rounding and preserves the total.

    Args:
        scores: float32 `[H_kv, T]`; the last `window` columns are the window's and are not read.
        rows: B, the mean rows per head, `window` to T.
        window: W, at least 0.
        floor: f, the fraction of B - W that every head gets at least, in [0, 1].

    Returns:
        int64 `[H_kv]`, window included: each `W + floor(f (B - W))` to T, their sum exactly H_kv * B.
    """
    num_kv_heads, num_tokens = scores.shape
    assert 0 <= window <= rows <= num_tokens, f"window {window}, rows {rows}, tokens {num_tokens}"
    assert 0 <= floor <= 1, f"floor is {floor}; it must be in [0, 1]"
    # the shortest decimal that gives this float is what the plan says: 0.29 of 100 is 29
    guaranteed = math.floor(Fraction(repr(floor)) * (rows - window))
    ranked = scores[:, : num_tokens - window].sort(dim=1, descending=True, stable=True).values
    contested = ranked[:, guaranteed:]
    num_contested = contested.shape[1]
    num_free = num_kv_heads * (rows - window - guaranteed)
    if num_free == 0:
        return torch.full((num_kv_heads,), rows, dtype=torch.int64, device=scores.device)
    # heads in order, each by descending score: a stable sort keeps a head's winners a prefix of its ranking
    winners = contested.flatten().sort(descending=True, stable=True).indices[:num_free]
    won = torch.bincount(winners // num_contested, minlength=num_kv_heads)
    return won + (window + guaranteed)
