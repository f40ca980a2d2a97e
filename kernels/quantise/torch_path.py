"""The quantiser in vectorised torch; arguments are checked by the dispatch in `__init__.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def quantise_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.quantise.quantise_rows`."""
    levels = (1 << bits) - 1
    values = rows.float()
    minima, maxima = values.amin(dim=-1), values.amax(dim=-1)
    span = maxima - minima
    # A NaN anywhere in a row reaches its extremes, and an infinity or an overflowing range reaches the span.
    if not bool(span.isfinite().all()):
        raise ValueError(
            "rows hold a value that is not finite, or a range beyond float32; all must be finite"
        )
    scales = span / levels
    # A subnormal range may underflow to a zero scale: it counts as no range.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = ((values - minima[..., None]) / scales[..., None]).round_().clamp_(0, levels)
    return codes.to(torch.uint8), scales, minima
