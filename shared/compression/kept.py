"""A picture of the tokens that each layer selected over the length of a prompt, for people to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

MAX_KEPT_BINS = 4096


def kept_fractions(
    positions: Mapping[int, Sequence[npt.NDArray[np.int32] | None]], num_tokens: int, num_bins: int
) -> tuple[float, ...]:
    """Return the fraction of its rows that each layer selected in each bin of the prompt, over its KV heads.

    Args:
        positions: of each layer, those that each head selected, in any order; None: all. Layers without
            heads are left out.
        num_tokens: T, at least 1.
        num_bins: bins of (nearly) equal length, 1 to MAX_KEPT_BINS; there are at most T. Token i is in bin
            `i * bins // T`.

    Returns: 0 to 1, of the first layer's bins, then of the next layer's.
    """
    bins = min(num_bins, num_tokens)

    def count(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        return np.bincount(tokens.astype(np.int64) * bins // num_tokens, minlength=bins)

    every = count(np.arange(num_tokens, dtype=np.int32))
    fractions: list[float] = []
    for _, heads in sorted(positions.items()):
        if not heads:
            continue
        kept = np.sum([every if tokens is None else count(tokens) for tokens in heads], axis=0)
        fractions += (kept / (every * len(heads))).astype(np.float32).tolist()
    return tuple(fractions)
