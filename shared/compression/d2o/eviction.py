"""Which prompt tokens stay: sinks, the top of the accumulated attention, recents. D2O section 4.2.1.

After a layer's budget is known, before merging. Does not touch K or V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.compression.select import select_rows

NUM_SINKS = 4
_SHARES = 4
"""N : M = 3 : 1, so the recents are one share of four."""


@dataclass(frozen=True, kw_only=True)
class Zones:
    """How the rows of one layer's cache divide, per KV head: `S = T + N + M` (section 4.2.1).

    Attributes:
        num_sinks: T, the first tokens.
        num_important: N, the highest scores of those between.
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

    Deviation: a budget too small for all sinks and one recent gives up sinks; the newest token always stays.

    Args: rows: S, at least 1. num_sinks: T, at least 0.
    """
    assert rows >= 1, f"rows is {rows}; it must be at least 1"
    assert num_sinks >= 0, f"num_sinks is {num_sinks}; it must be at least 0"
    sinks = min(num_sinks, rows - 1)
    recents = max(1, (rows - sinks) // _SHARES)
    return Zones(num_sinks=sinks, num_important=rows - sinks - recents, num_recents=recents)


def kept_positions(scores: Tensor, layer_zones: Zones) -> Tensor:
    """The tokens that stay: `[:T]`, `Top_N(AttnScore[T : -M])`, `[-M:]` (Eq. 7 and 8).

    Args: scores float32 `[H_kv, T]`, accumulated attention; not changed. `layer_zones.rows` is at most T.
    Returns: int32 `[H_kv, S]`, ascending; of equal scores the lowest position stays.
    """
    num_tokens = scores.shape[1]
    forced = scores.clone()
    forced[:, : layer_zones.num_sinks] = torch.inf
    forced[:, num_tokens - layer_zones.num_recents :] = torch.inf
    return select_rows(forced, layer_zones.rows)
