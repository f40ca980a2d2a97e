"""The quantiser value by value, written like RDKV's appendix B. For tests only."""

from __future__ import annotations

from torch import Tensor


def quantise_row(row: Tensor, bits: int) -> tuple[list[int], float, float]:
    """Codes, scale and minimum of one row.

    Args: row `[C]`. Returns: C codes in [0, 2^b - 1], s and min with `x ~ s code + min`.
    """
    values = [float(x) for x in row]
    minimum, levels = min(values), 2**bits - 1
    scale = (max(values) - minimum) / levels
    if scale == 0:
        return [0] * len(values), 1.0, minimum
    return [min(max(round((x - minimum) / scale), 0), levels) for x in values], scale, minimum
