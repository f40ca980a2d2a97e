"""The place of a packed head's regions as a row of int64, which Triton kernels read.

Offsets count elements of each region's dtype from the start of one buffer, which may contain many layers.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.packed.key_words import WIDTHS
from kvferry.kernels.packed.layer import PackedLayer

FIELDS = 20
"""Columns: the caller's number, channels of each width (4), tokens of each width (4), then offsets of
key_words (int16), channels (int16), key scales, key minima, value scales, value minima (float32), values 2,
4, 8 (int16), values 16 (float16), positions (int32)."""


def packed_entry(layer: PackedLayer, h: int, base: Tensor, number: int) -> list[int]:
    """The row of head h.

    Args: base: the tensor that offsets count from; the layer's buffer is a multiple of 16 bytes from it.
    """
    regions, counts = layer.layout.regions[h], layer.layout.heads[h]
    start = layer.buffer.data_ptr() - base.data_ptr()

    def place(name: str, size: int) -> int:
        return (start + regions[name].offset) // size

    return [
        number,
        *counts.channels,
        *counts.tokens,
        place("key_words", 2),
        place("channels", 2),
        *(place(name, 4) for name in ("key_scales", "key_minima", "value_scales", "value_minima")),
        *(place(f"values_{width}", 2) for width in WIDTHS),
        place("positions", 4),
    ]
