"""A map of the tokens that each layer selected over the length of a prompt, for people to look at."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from torch import Tensor

MAX_KEPT_BINS = 4096


class KeptMap:
    """Counts, for each layer over its KV heads, the selected tokens in each bin of the prompt.

    Args:
        num_tokens: T, at least 1.
        num_bins: bins of (nearly) equal length, 1 to MAX_KEPT_BINS; there are at most T. Token i is in bin
            `i * bins // T`.
    """

    def __init__(self, *, num_tokens: int, num_bins: int) -> None:
        assert 1 <= num_bins <= MAX_KEPT_BINS, num_bins
        self._num_tokens = num_tokens
        self._num_bins = min(num_bins, num_tokens)
        self._tokens_in_bin = self._count(np.arange(num_tokens, dtype=np.int64))
        self._layers: dict[int, tuple[npt.NDArray[np.int64], int]] = {}
        """Of each layer, how many rows each bin has, and of how many heads."""

    def add(self, layer: int, positions_by_head: Iterable[Tensor | None]) -> None:
        """Count one layer. Args: positions_by_head: as `LayerFormat.positions_by_head`."""
        num_heads, kept = 0, np.zeros_like(self._tokens_in_bin)
        for positions in positions_by_head:
            num_heads += 1
            kept += (
                self._tokens_in_bin
                if positions is None
                else self._count(positions.cpu().numpy().astype(np.int64))
            )
        if num_heads:
            self._layers[layer] = kept, num_heads

    def add_heads(self, other: KeptMap) -> None:
        """Count other heads of the same layers, too."""
        for layer, (kept, num_heads) in other._layers.items():
            own, num_own = self._layers[layer]
            self._layers[layer] = own + kept, num_own + num_heads

    def fractions(self) -> tuple[float, ...]:
        """The fraction of rows selected in each bin, 0 to 1: of the first layer's bins, then of the next
        layer's."""
        fractions: list[float] = []
        for _, (kept, num_heads) in sorted(self._layers.items()):
            fractions += (kept / (self._tokens_in_bin * num_heads)).astype(np.float32).tolist()
        return tuple(fractions)

    def _count(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.bincount(positions * self._num_bins // self._num_tokens, minlength=self._num_bins)
