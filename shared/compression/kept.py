"""A coarse map of the selected tokens over the length of a prompt, for people to look at."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MAX_KEPT_BINS = 512


class KeptMap:
    """Counts, over layers and KV heads, the selected tokens in each bin of the prompt.

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
        self._kept = torch.zeros(bins, dtype=torch.int64)
        self._num_heads = 0

    def add(self, positions_by_head: Iterable[Tensor | None]) -> None:
        """Count one layer. Args: positions_by_head: as `LayerFormat.positions_by_head`."""
        for positions in positions_by_head:
            self._num_heads += 1
            if positions is None:
                self._kept += self._tokens_in_bin
            else:
                bins = self._bin_of_token[positions.to("cpu", torch.int64)]
                self._kept += torch.bincount(bins, minlength=len(self._kept))

    def fractions(self) -> tuple[float, ...]:
        """The fraction of rows selected in each bin, 0 to 1; empty if no layer was counted."""
        if self._num_heads == 0:
            return ()
        return tuple((self._kept / (self._tokens_in_bin * self._num_heads)).tolist())
