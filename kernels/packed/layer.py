"""Views of one layer's packed K and V.

Decode views the bytes it received and attends to them as they are (`kernels/trizone`). `packing.py` writes
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.packed.key_words import groups_of
from kvferry.kernels.packed.layout import OFFSET_BYTES, HeadCounts, PackedLayout

ENTRY_FIELDS = 20
"""Columns of `packed_entries`: the caller's number, channels of each width (4), tokens of each width (4), and
offsets of key_words (int16), channels (int16), key scales, key minima, value scales, value minima (float16),
values 2, 4, 8 (int16), values 16 (float16), and the offset of the positions, which only packing reads, from a
tensor of its own. Offsets count from the start of one buffer, which may contain many layers."""
_FIRST_OFFSET = 9


@dataclass(frozen=True, kw_only=True)
class PackedHead:
    """Views of one KV head's regions.

    Attributes:
        key_words: uint8, see `key_words.py`.
        values_2, values_4, values_8: uint8 `[n_w, row bytes]`, see `value_rows.py`.
        key_scales, key_minima: float16 `[groups, c]`, of the channels below 16 bits.
        value_scales, value_minima: float16, of the tokens below 16 bits.
        values_16: float16 `[n_16, D]`, zone B.
        channels: int16, the retained K channels in packed order.
        positions: uint16 or int32, the retained tokens in packed order.
    """

    counts: HeadCounts
    key_words: Tensor
    values_2: Tensor
    values_4: Tensor
    values_8: Tensor
    key_scales: Tensor
    key_minima: Tensor
    value_scales: Tensor
    value_minima: Tensor
    values_16: Tensor
    channels: Tensor
    positions: Tensor

    def dequantise_keys(self, codes: Tensor, tokens: Tensor) -> Tensor:
        """Dequantise K of some tokens: `s code + min`, with scale and minimum by channel and the token's
        group.

        Args: codes float32 `[c, k]`, channels in packed order, written over; tokens int64 `[k]`.
        """
        groups = groups_of(tokens, self.counts.num_tokens)
        coded = codes[: self.key_scales.shape[1]]
        coded.mul_(self.key_scales[groups].T).add_(self.key_minima[groups].T)
        return codes


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """A layer's bytes, uint8 `[layout.size_bytes]`, and its heads' views of them."""

    layout: PackedLayout
    buffer: Tensor
    heads: tuple[PackedHead, ...]

    @cached_property
    def plans(self) -> dict[int, Any]:
        """The torch path's plans for this layer by thread; they live as long as the layer."""
        return {}


def view_packed_layer(layout: PackedLayout, buffer: Tensor) -> PackedLayer:
    """View bytes as a packed layer, without a copy.

    Raises:
        ValueError: the buffer is not contiguous uint8 `[layout.size_bytes]` at a multiple of ALIGNMENT_BYTES.
    """
    if buffer.dtype != torch.uint8 or buffer.shape != (layout.size_bytes,) or not buffer.is_contiguous():
        raise ValueError(
            f"the buffer is {buffer.dtype} {tuple(buffer.shape)}; it must be contiguous uint8 "
            f"[{layout.size_bytes}]"
        )
    if layout.size_bytes and buffer.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"the buffer must start at a multiple of {ALIGNMENT_BYTES} bytes")
    typed: dict[torch.dtype, Tensor] = {}
    for dtype in (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.float16):
        typed[dtype] = buffer.view(dtype)
    heads = []
    for counts, regions in zip(layout.heads, layout.regions, strict=True):
        views: dict[str, Tensor] = {}
        for name, region in regions.items():
            base, shape = typed[region.dtype], region.shape
            start = base.storage_offset() + region.offset // region.dtype.itemsize
            views[name] = base.as_strided(shape, (shape[-1], 1)[-len(shape) :], start)
        heads.append(PackedHead(counts=counts, **views))
    return PackedLayer(layout=layout, buffer=buffer, heads=tuple(heads))


def packed_entries(layers: Sequence[PackedLayer], base: Tensor) -> Tensor:
    """Return the places of all heads' regions as rows that Triton kernels read.

    Returns: int64 `[layers, H_kv, ENTRY_FIELDS]` on the host; column 0 is 0.

    Args: base: the tensor that offsets count from; the layers' buffers are multiples of 16 bytes from it.
    """
    start = base.data_ptr()
    entries = torch.stack([layer.layout.entries for layer in layers])
    starts = torch.tensor([layer.buffer.data_ptr() - start for layer in layers])
    entries[:, :, _FIRST_OFFSET:-1] += starts[:, None, None] // OFFSET_BYTES
    return entries
