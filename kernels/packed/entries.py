"""The place of a packed head's regions as a row of int64, which Triton kernels read.

Offsets count elements of each region's dtype from the start of one buffer, which may contain many layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.layout import OFFSET_BYTES

FIELDS = 20
"""Columns: the caller's number, channels of each width (4), tokens of each width (4), then offsets of
key_words (int16), channels (int16), key scales, key minima, value scales, value minima (float16), values 2,
4, 8 (int16), values 16 (float16), and the offset of the positions, which only packing reads, from a tensor
of its own."""


FIRST_OFFSET = 9


def packed_entries(layers: Sequence[PackedLayer], base: Tensor) -> Tensor:
    """The rows of all heads of these layers, int64 `[layers, H_kv, FIELDS]` on the host; column 0 is 0.

    Args: base: the tensor that offsets count from; the layers' buffers are multiples of 16 bytes from it.
    """
    start = base.data_ptr()
    entries = torch.stack([layer.layout.entries for layer in layers])
    starts = torch.tensor([layer.buffer.data_ptr() - start for layer in layers])
    entries[:, :, FIRST_OFFSET:-1] += starts[:, None, None] // OFFSET_BYTES
    return entries
