"""Which tokens are retained: sinks, the highest accumulated attention, recents. D2O section 4.2.1, and H2O.

Scorers use it for the prompt, `EvictingCache` at each decode step. It does not read K or V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    Args: rows: S, at least 1. num_sinks: T, at least 0.
    """
    assert rows >= 1, f"rows is {rows}; it must be at least 1"
    assert num_sinks >= 0, f"num_sinks is {num_sinks}; it must be at least 0"
    sinks = min(num_sinks, rows - 1)
    recents = max(1, (rows - sinks) // _SHARES)
    return Zones(num_sinks=sinks, num_important=rows - sinks - recents, num_recents=recents)


def half_zones(rows: int) -> Zones:
    """H2O's zones (Zhang et al. 2023): half of the rows, rounded up, are recents; no sinks.

    Args: rows: S, at least 1.
    """
    assert rows >= 1, f"rows is {rows}; it must be at least 1"
    return Zones(num_sinks=0, num_important=rows // 2, num_recents=rows - rows // 2)


def protected(scores: Tensor, layer_zones: Zones) -> Tensor:
    """Accumulated attention with +inf on sinks and recents, so that the S highest scores are those of the
    retained tokens: `[:T]`, `Top_N(AttnScore[T : -M])`, `[-M:]` (Eq. 7 and 8).

    Args: scores: float32, `[H_kv, number of prompt tokens]`; not changed.
    Returns: the same shape.
    """
    num_tokens = scores.shape[1]
    forced = scores.clone()
    forced[:, : layer_zones.num_sinks] = torch.inf
    forced[:, max(num_tokens - layer_zones.num_recents, 0) :] = torch.inf
    return forced
