"""Packed K and V of one layer: mixed-bit codes, scales, float16 rows and indexes in one run of bytes.

The layout (`layout.py`, `key_words.py`, `value_rows.py`) is a format between machines, of `LAYOUT_VERSION`.
"""

from __future__ import annotations

from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.packed.layer import (
    PackedHead,
    PackedLayer,
    check_packed_layer,
    unpack_layer,
    view_packed_layer,
)
from kvferry.kernels.packed.layout import (
    KINDS,
    LAYOUT_VERSION,
    HeadCounts,
    PackedLayout,
    max_packed_bytes,
    packed_layout,
)
from kvferry.kernels.packed.packing import pack_layer

__all__ = [
    "ALIGNMENT_BYTES",
    "KINDS",
    "LAYOUT_VERSION",
    "HeadCounts",
    "PackedHead",
    "PackedLayer",
    "PackedLayout",
    "check_packed_layer",
    "max_packed_bytes",
    "pack_layer",
    "packed_layout",
    "unpack_layer",
    "view_packed_layer",
]
