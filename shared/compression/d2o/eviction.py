"""Which tokens are retained: sinks, the highest accumulated attention, recents. D2O section 4.2, and H2O.

Scorers use the zones for the prompt. `formats/evicting.py` makes an `EvictingCache` for each decode step over
a layer's regions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.compression.d2o.merging import cosine_similarities, merge_weight, next_threshold

NUM_SINKS = 4
_SHARES = 4
"""N : M = 3 : 1, so one of four shares is for recents."""


@dataclass(frozen=True, kw_only=True)
class Zones:
    """How the S rows of a layer's cache divide, per KV head: `S = T + N + M` (section 4.2.1).

    Attributes:
        num_sinks: T, the first tokens.
        num_important: N, those of the other tokens with the highest scores.
        num_recents: M, the last tokens, at least 1.
    """

    num_sinks: int
    num_important: int
    num_recents: int

    @property
    def rows(self) -> int:
        """S."""
        return self.num_sinks + self.num_important + self.num_recents


def zones(rows: int, *, num_sinks: int = NUM_SINKS) -> Zones:
    """Divide a layer's rows: `M = max(1, floor((S - T) / 4))`, `N = S - T - M`.

    Deviation: if the budget is too small for all sinks and one recent, there are fewer sinks; the newest
    token is always retained.

    Args: rows: S, at least 1; num_sinks: T, at least 0.
    """
    assert rows >= 1, f"rows is {rows}; it must be at least 1"
    assert num_sinks >= 0, f"num_sinks is {num_sinks}; it must be at least 0"
    sinks = min(num_sinks, rows - 1)
    recents = max(1, (rows - sinks) // _SHARES)
    return Zones(num_sinks=sinks, num_important=rows - sinks - recents, num_recents=recents)


def half_zones(rows: int) -> Zones:
    """Return H2O's zones (Zhang et al. 2023): half of the rows, rounded up, are recents; no sinks.

    Args: rows: S, at least 1.
    """
    assert rows >= 1, f"rows is {rows}; it must be at least 1"
    return Zones(num_sinks=0, num_important=rows // 2, num_recents=rows - rows // 2)


def protected(scores: Tensor, layer_zones: Zones) -> Tensor:
    """Return accumulated attention with +inf on sinks and recents, so that the S highest scores are those of
    the retained tokens: `[:T]`, `Top_N(AttnScore[T : -M])`, `[-M:]` (Eq. 7 and 8).

    Args: scores: float32, `[H_kv, number of prompt tokens]`; not changed.
    Returns: the same shape.
    """
    num_tokens = scores.shape[1]
    forced = scores.clone()
    forced[:, : layer_zones.num_sinks] = torch.inf
    forced[:, max(num_tokens - layer_zones.num_recents, 0) :] = torch.inf
    return forced


@dataclass(frozen=True, kw_only=True)
class EvictingCache:
    """Decode's cache of one layer at a fixed size: S retained rows and, during a step, the new token's row.

        keys, values   | 0 ... S-1: retained rows, in no particular order | S: the new token's row |

        append ──► row S is written
        attend ──► output over rows 0..S, and the attention row
        evict  ──► scores += attention row; the lowest score between sinks and recents is evicted;
                   with thresholds: tau is updated, the evicted row is merged into its nearest row or dropped;
                   row S is moved to the evicted row's place, and row S is free again

    The size is constant: after each step there are S rows, and an evicted row's score is dropped with it. No
    call synchronizes the device. All tensors belong to the caller and are changed in place.

    Attributes:
        keys, values: `[H_kv, S + 1, D]`.
        scores: float32 `[H_kv, S]`, accumulated attention of the rows, summed over the group.
        positions: int `[H_kv, S]`, the rows' tokens. Sinks are the first tokens of the sequence. The newest
            token is always among the rows, so the next token's position is the largest position plus one.
        layer_zones: the zones of S rows.
        thresholds: float32 `[H_kv]`, tau, NaN where unset; None if evicted rows are dropped.
        is_latent: whether values are a view of the keys' first channels, which change with them.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    positions: Tensor
    layer_zones: Zones
    thresholds: Tensor | None = None
    is_latent: bool = False

    def __post_init__(self) -> None:
        assert self.layer_zones.rows == self._rows, (self.layer_zones, self.scores.shape)

    @property
    def _rows(self) -> int:
        return self.scores.shape[1]

    @property
    def _stored(self) -> tuple[Tensor, ...]:
        return (self.keys,) if self.is_latent else (self.keys, self.values)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write the new token's row. Args: key, value: `[H_kv, D]`, key post-RoPE."""
        self.keys[:, self._rows] = key
        self.values[:, self._rows] = value

    def attend(self, queries: Tensor, *, scaling: float) -> tuple[Tensor, Tensor]:
        """Compute `softmax(scaling * q K^T) V` over all rows, the new token's included.

        Args: queries: `[H_kv, G, D]`.
        Returns: output `[H_kv, G, D]` in the queries' dtype; the attention row, float32 `[H_kv, S + 1]`: the
            probabilities summed over the group.
        """
        logits = torch.bmm(queries.float(), self.keys.float().transpose(1, 2)) * scaling
        weights = logits.softmax(dim=-1)
        return torch.bmm(weights, self.values.float()).to(queries.dtype), weights.sum(1)

    def evict(self, attention_row: Tensor) -> None:
        """Add the appended token to the rows and evict one row (Eq. 6 to 12, token generation).

        Among equal scores the latest token is evicted.

        Deviation: the paper does not say what happens to an evicted token's score; here it is not added to
        the row into which the token is merged.

        Args: attention_row: float32 `[H_kv, S + 1]`, of the appended token's query, summed over the group, in
            the order of the rows.
        """
        heads, last = torch.arange(len(self.scores), device=self.scores.device), self._rows
        next_positions = self.positions.amax(dim=1) + 1
        self.scores.add_(attention_row[:, :last])
        evicted = self._lowest(next_positions)
        if self.thresholds is not None:
            self._merge(heads, evicted, self.thresholds)
        for rows in self._stored:
            rows[heads, evicted] = rows[:, last].clone()
        self.scores[heads, evicted] = attention_row[:, last]
        self.positions[heads, evicted] = next_positions

    def _merge(self, heads: Tensor, evicted: Tensor, thresholds: Tensor) -> None:
        """Update tau; merge each head's evicted row, int64 `[H_kv]`, into its nearest if u reaches tau."""
        evicted_rows = [rows[heads, evicted] for rows in self._stored]
        similarities = cosine_similarities(evicted_rows[0][:, None], self.keys)[:, 0]
        similarities[heads, evicted] = -torch.inf
        similarity, nearest = similarities.max(dim=1)
        thresholds.copy_(next_threshold(thresholds, similarity))
        weight = merge_weight(similarity, thresholds)[:, None]
        for rows, row in zip(self._stored, evicted_rows, strict=True):
            target = rows[heads, nearest]
            merged = (math.e * target.float() + weight * row.float()) / (math.e + weight)
            rows[heads, nearest] = torch.where(weight > 0, merged.to(rows.dtype), target)

    def _lowest(self, next_positions: Tensor) -> Tensor:
        """Return the row with the lowest score between sinks and recents, int64 `[H_kv]`; among equal scores
        the latest."""
        first_recent = next_positions[:, None] + 1 - self.layer_zones.num_recents
        between = (self.positions >= self.layer_zones.num_sinks) & (self.positions < first_recent)
        scores = torch.where(between, self.scores, torch.inf)
        lowest = between & (scores == scores.amin(dim=1, keepdim=True))
        return torch.where(lowest, self.positions, -1).argmax(dim=1)
