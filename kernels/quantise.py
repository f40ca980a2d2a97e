"""Asymmetric uniform quantiser: one scale and one minimum per row, 2, 4 or 8 bits a code.

Prefill quantises what it is about to pack: a row is a K channel over the retained tokens, or a V token over
the head's channels. Does not choose widths (shared/compression/rdkv) and does not pack (`kernels/packed`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dispatch import path_for

WIDTHS = (2, 4, 8)
"""Code widths in bits."""
_HALF_STEP = 2.0**-10
"""At least the spacing of float16 values, relative to a value that is not subnormal."""


def half_headers(minima: Tensor, maxima: Tensor, levels: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return a row's scale and minimum as float16 values: the minimum is rounded down and the scale up, so
    that the codes still cover the row. A range or a minimum far below its row's values costs precision but
    loses no value.

    Args: float32; levels: `2^b - 1`. Returns: scales and minima, float16, not finite if out of range.
    """
    nearest = minima.half()
    low = torch.where(nearest.float() <= minima, nearest, (minima - minima.abs() * _HALF_STEP).half())
    scales = (maxima - low.float()) / levels
    scales = (scales + scales * _HALF_STEP).half()
    return torch.where(scales > 0, scales, 1.0), low


def quantise_rows(rows: Tensor, bits: int | Tensor, *, half: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `s = (max - min) / (2^b - 1)`, `code = round((x - min) / s)`; a row of zero range has s = 1,
    code 0.

    Deviation: the paper stores a zero point z and dequantises `s (code - z)`. The minimum stored here equals
    an unrounded and unclamped z; a clamped one loses every channel whose values all have one sign.

    Args:
        rows: floating `[..., R, C]`, C >= 1, rows at any stride.
        bits: b, 2, 4 or 8; or integers `[R]`, one b per row, which the caller has checked.
        half: scales and minima are float16, see `half_headers`.

    Returns:
        codes uint8 `[..., R, C]` below 2^b; scales and minima float32, or float16, `[..., R]`.

    Raises:
        ValueError: another width, no columns, or a value that is not finite in float32, or in float16 if the
            scales are.
    """
    if isinstance(bits, int) and bits not in WIDTHS:
        raise ValueError(f"bits is {bits}; it must be one of {WIDTHS}")
    if rows.ndim < 2 or rows.shape[-1] < 1 or not rows.is_floating_point():
        raise ValueError(
            f"rows are {tuple(rows.shape)} {rows.dtype}; they must be floating [..., R, C], C >= 1"
        )
    path_for("quantise", rows.device)
    values = rows.float()
    minima, maxima = values.amin(dim=-1), values.amax(dim=-1)
    span = maxima - minima
    # a NaN in a row reaches its extremes; an infinity or an overflowing range reaches the span
    if not bool(span.isfinite().all()):
        raise ValueError(
            "rows have a value that is not finite, or a range beyond float32; all must be finite"
        )
    levels = torch.as_tensor(bits, device=rows.device).exp2().sub_(1)
    if half:
        scales, minima = half_headers(minima, maxima, levels)
        if not bool((scales.isfinite() & minima.isfinite()).all()):
            raise ValueError("rows have a value that is not finite in float16; all must be within +-65504")
    else:
        # a subnormal range may underflow to a zero scale: it counts as no range
        scales = span / levels
        scales = torch.where(scales > 0, scales, 1.0)
    steps = (values - minima.float()[..., None]) / scales.float()[..., None]
    codes = steps.round_().clamp_(min=0).minimum(levels[..., None])
    return codes.to(torch.uint8), scales, minima


def dequantise_rows(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Compute `s code + min` in float32.

    Args: codes uint8 `[..., R, C]`; scales, minima float32 or float16 `[..., R]`.
    Returns: float32 `[..., R, C]`.
    """
    return codes.float() * scales.float()[..., None] + minima.float()[..., None]
