"""Quantising and packing a layer in Triton: ranges of K channels, K words, V rows; three launches a layer.

Heads have different numbers of tokens at different widths; items have about equal bytes. The result equals
the torch path's bit by bit: ranges are exact, divisions and roundings are IEEE's.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.packed.key_words import BLOCK_TOKENS, WIDTHS
from kvferry.kernels.packed.layer import ENTRY_FIELDS, PackedLayer, packed_entries
from kvferry.kernels.packed.layout import Kind
from kvferry.kernels.packed.packing_kernels import (
    _key_ranges_kernel,
    _pack_keys_kernel,
    _pack_values_kernel,
)
from kvferry.kernels.quantise import half_headers

ITEM_BYTES = 64 << 10
"""Bytes that an item reads, about."""
KEY_ITEM_FIELDS = 3
"""Columns of an item of K: head, first and last token block."""
VALUE_ITEM_FIELDS = 4
"""Columns of an item of V: head, width as an index into `WIDTHS`, first and last token of that width."""


def fill(packed: PackedLayer, keys: Tensor, values: Tensor) -> None:
    """Quantise and pack the channels and tokens in the layer's index.

    Args:
        packed: its channels and positions are written already.
        keys, values: `[H_kv, T, D]`, rows' elements contiguous.

    Raises:
        ValueError: a retained value is not finite in float16.
    """
    if not packed.buffer.numel():
        return
    device, buffer = keys.device, packed.buffer
    (entries,) = packed_entries([packed], buffer)
    entries[:, 0] = torch.arange(len(packed.heads))
    positions = torch.cat([head.positions.to(torch.int32) for head in packed.heads])
    counts = torch.tensor([head.counts.num_tokens for head in packed.heads])
    entries[:, ENTRY_FIELDS - 1] = counts.cumsum(0) - counts
    entries = entries.to(device, non_blocking=True)
    words, halves = (buffer.view(dtype) for dtype in (torch.int16, torch.float16))
    _fill_key_ranges(packed, keys, positions, entries)
    key_items, value_items = _items(packed, keys.element_size())
    if key_items:
        _pack_keys_kernel[(len(key_items),)](
            keys, words, positions, halves, entries, torch.tensor(key_items, dtype=torch.int32).to(device),
            keys.stride(0), keys.stride(1), BLOCK_C=32, FIELDS=ENTRY_FIELDS, num_warps=4,
        )  # fmt: skip
        head_dim = packed.layout.head_dim
        block_d = triton.next_power_of_2(head_dim)
        _pack_values_kernel[(len(value_items),)](
            values, buffer, halves, positions, halves, entries,
            torch.tensor(value_items, dtype=torch.int32).to(device), values.stride(0), values.stride(1),
            D=head_dim, BLOCK_D=block_d, BLOCK_T=_tile_tokens(block_d), FIELDS=ENTRY_FIELDS, num_warps=4,
        )  # fmt: skip
    checked: tuple[Kind, ...] = ("scales", "rows")
    for kind in checked:
        start, size = packed.layout.kinds[kind]
        if not bool(buffer[start : start + size].view(torch.float16).isfinite().all()):
            raise ValueError("rows have a value that is not finite, or too large for its width")


def _fill_key_ranges(packed: PackedLayer, keys: Tensor, positions: Tensor, entries: Tensor) -> None:
    """Write the scales and minima of K's coded channels."""
    num_heads, block_d = len(packed.heads), max(triton.next_power_of_2(keys.shape[2]), 16)
    chunk = 512
    longest = max(head.counts.num_tokens for head in packed.heads)
    num_chunks = max(triton.cdiv(longest, chunk), 1)
    ranges = torch.empty(num_heads, num_chunks, 2, block_d, dtype=torch.float32, device=keys.device)
    _key_ranges_kernel[(num_heads, num_chunks)](
        keys, positions, entries, ranges, keys.stride(0), keys.stride(1),
        D=keys.shape[2], BLOCK_D=block_d, BLOCK_T=_tile_tokens(block_d), CHUNK=chunk,
        FIELDS=ENTRY_FIELDS, num_warps=4,
    )  # fmt: skip
    lowest, highest = ranges[:, :, 0].amin(1), ranges[:, :, 1].amax(1)
    for h, head in enumerate(packed.heads):
        start = 0
        channels = head.channels.long()
        for width, count in zip(WIDTHS, head.counts.channels, strict=True):
            low, high = (ranges[h, channels[start : start + count]] for ranges in (lowest, highest))
            if width == 16:
                if not bool((low.half().isfinite() & high.half().isfinite()).all()):
                    raise ValueError("a 16-bit value is not finite in float16; all must be within +-65504")
                break
            scales, minima = half_headers(low, high, 2**width - 1)
            if not bool((scales.isfinite() & minima.isfinite()).all()):
                raise ValueError("a key is not finite in float16; all must be within +-65504")
            head.key_scales[start : start + count] = scales
            head.key_minima[start : start + count] = minima
            start += count


def _tile_tokens(block_d: int) -> int:
    """Tokens per tile: 64 bytes of 16-bit rows for each of 128 threads; more in the interpreter."""
    return 128 if interpreting() else min(4096 // block_d, 64)


def _items(packed: PackedLayer, element_bytes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Items of about `ITEM_BYTES` of K and of V."""
    key_items: list[list[int]] = []
    value_items: list[list[int]] = []
    value_tokens = max(ITEM_BYTES // (packed.layout.head_dim * element_bytes), 1)
    for h, head in enumerate(packed.heads):
        num_blocks = triton.cdiv(head.counts.num_tokens, BLOCK_TOKENS)
        block_bytes = BLOCK_TOKENS * max(head.counts.num_channels, 1) * element_bytes
        step = max(ITEM_BYTES // block_bytes, 1)
        key_items += [[h, b, min(b + step, num_blocks)] for b in range(0, num_blocks, step)]
        for kind, count in enumerate(head.counts.tokens):
            value_items += [[h, kind, t, min(t + value_tokens, count)] for t in range(0, count, value_tokens)]
    return key_items, value_items
