"""A map of the tokens that each layer selected over the length of a prompt, for people to look at."""

from __future__ import annotations

from collections.abc import Iterable

import torch
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
        bins = min(num_bins, num_tokens)
        self._bin_of_token = torch.arange(num_tokens, dtype=torch.int64) * bins // num_tokens
        self._tokens_in_bin = torch.bincount(self._bin_of_token, minlength=bins)
        self._layers: dict[int, Tensor] = {}

    def add(self, layer: int, positions_by_head: Iterable[Tensor | None]) -> None:
        """Count one layer. Args: positions_by_head: as `LayerFormat.positions_by_head`."""
        num_heads, kept = 0, torch.zeros_like(self._tokens_in_bin)
        for positions in positions_by_head:
            num_heads += 1
            if positions is None:
                kept += self._tokens_in_bin
            else:
                bins = self._bin_of_token[positions.to("cpu", torch.int64)]
                kept += torch.bincount(bins, minlength=len(kept))
        if num_heads:
            self._layers[layer] = kept / (self._tokens_in_bin * num_heads)

    def fractions(self) -> tuple[float, ...]:
        """The fraction of rows selected in each bin, 0 to 1: of the first layer's bins, then of the next
        layer's."""
        return tuple(value for layer in sorted(self._layers) for value in self._layers[layer].tolist())
