"""D2O token by token in plain Python and float64, written to be read beside section 4.2. For tests.

One KV head at a time: keys and values are lists of `[D]` tensors in float64, scores are lists of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


def zone_sizes(rows: int, num_sinks: int = 4) -> tuple[int, int, int]:
    """T, N and M of `S = T + N + M`, N : M = 3 : 1, at least one recent."""
    sinks = min(num_sinks, rows - 1)
    recents = max(1, math.floor((rows - sinks) / 4))
    return sinks, rows - sinks - recents, recents


def kept_tokens(scores: Sequence[float], rows: int, num_sinks: int = 4) -> list[int]:
    """Eq. 7 and 8: `[K[:T], K[I], K[-M:]]` with `I = Top_N(AttnScore[T : -M], N)`."""
    sinks, important, recents = zone_sizes(rows, num_sinks)
    length = len(scores)
    between = list(range(sinks, length - recents))
    top = sorted(between, key=lambda t: (-scores[t], t))[:important]
    return [*range(sinks), *sorted(top), *range(length - recents, length)]


def cosine(a: Tensor, b: Tensor) -> float:
    """u of Eq. 9."""
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms > 0 else 0.0


def nearest(key: Tensor, kept: Sequence[Tensor]) -> tuple[float, int]:
    """`max_j u_j` and the first such j."""
    similarities = [cosine(key, other) for other in kept]
    u = max(similarities)
    return u, similarities.index(u)


def weighted_merge(kept: Tensor, others: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Eq. 11 with weights that sum to one: `(e k_j + sum e^{u_i} k_i) / (e + sum e^{u_i})`."""
    total = math.e + sum(math.exp(u) for u, _ in others)
    merged = kept * (math.e / total)
    for u, row in others:
        merged = merged + row * (math.exp(u) / total)
    return merged


def merge_prompt_head(
    keys: Sequence[Tensor], values: Sequence[Tensor], kept: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], float]:
    """Section 4.2.2 for a prompt: the retained rows after merging, and tau_0 (NaN if nothing was evicted)."""
    evicted = [t for t in range(len(keys)) if t not in kept]
    found = {t: nearest(keys[t], [keys[j] for j in kept]) for t in evicted}
    tau = sum(u for u, _ in found.values()) / len(evicted) if evicted else math.nan
    new_keys, new_values = [], []
    for j, token in enumerate(kept):
        merged = [t for t in evicted if found[t][1] == j and found[t][0] >= tau]
        new_keys.append(weighted_merge(keys[token], [(found[t][0], keys[t]) for t in merged]))
        new_values.append(weighted_merge(values[token], [(found[t][0], values[t]) for t in merged]))
    return new_keys, new_values, tau


@dataclass(kw_only=True)
class ReferenceRow:
    """One retained token of one KV head."""

    position: int
    key: Tensor
    value: Tensor
    score: float


class ReferenceCache:
    """Decode's cache of one KV head, with rows in position order."""

    def __init__(
        self, rows: list[ReferenceRow], tau: float, *, num_sinks: int = 4, beta: float = 0.7
    ) -> None:
        self.rows = rows
        self.tau = tau
        self._beta = beta
        self._sinks, _, self._recents = zone_sizes(len(rows), num_sinks)

    def step(self, attention: Sequence[float], new: ReferenceRow) -> None:
        """Eq. 6: add the new token's attention to the scores; then evict one row, which is merged or dropped.

        Args: attention: of the rows in position order, then of the new row.
        """
        for row, weight in zip(self.rows, attention[:-1], strict=True):
            row.score += weight
        new.score = attention[-1]
        rows = [*self.rows, new]
        between = range(self._sinks, len(rows) - self._recents)
        gone = rows.pop(min(between, key=lambda i: (rows[i].score, -i)))
        u, j = nearest(gone.key, [row.key for row in rows])
        # Eq. 10, t > 0
        self.tau = u if math.isnan(self.tau) else self._beta * u + (1 - self._beta) * self.tau
        if u >= self.tau:
            rows[j].key = weighted_merge(rows[j].key, [(u, gone.key)])
            rows[j].value = weighted_merge(rows[j].value, [(u, gone.value)])
        self.rows = rows
