"""Quantising and packing a layer in Triton: ranges, scales and words of K, rows of V; four launches a layer.

Heads have different numbers of tokens at different widths; items have about equal bytes. The result equals
the torch path's bit by bit: ranges are exact, divisions and roundings are IEEE's.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.packed.key_words import BLOCK_TOKENS
from kvferry.kernels.packed.layer import ENTRY_FIELDS, PackedLayer, packed_entries
from kvferry.kernels.packed.layout import position_dtype
from kvferry.kernels.packed.packing_kernels import (
    _key_headers_kernel,
    _key_ranges_kernel,
    _pack_keys_kernel,
    _pack_values_kernel,
)

ITEM_BYTES = 64 << 10
"""Bytes that an item reads, about."""
_CHUNK = 512
"""Tokens whose range of each K channel one program finds."""
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
    device, buffer, layout = keys.device, packed.buffer, packed.layout
    (entries,) = packed_entries([packed], buffer)
    entries[:, 0] = torch.arange(len(packed.heads))
    start, size_bytes = layout.kinds["index"]
    # int32, whatever they are stored as: kernels are compiled once
    positions = buffer[start : start + size_bytes].view(position_dtype(layout.num_tokens)).to(torch.int32)
    for h, regions in enumerate(layout.regions):
        region = regions["positions"]
        entries[h, ENTRY_FIELDS - 1] = (region.offset - start) // region.dtype.itemsize
    key_items, value_items = _items(packed, keys.element_size())
    # one copy to the device
    parts = [entries, *(torch.tensor(its, dtype=torch.int64) for its in (key_items, value_items))]
    tables = torch.cat([its.flatten() for its in parts]).to(device, non_blocking=True)
    entries, of_keys, of_values = tables.split([its.numel() for its in parts])
    words, halves = (buffer.view(dtype) for dtype in (torch.int16, torch.float16))
    num_heads, head_dim = len(packed.heads), layout.head_dim
    refused = torch.empty(num_heads, dtype=torch.int32, device=device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    num_chunks = max(triton.cdiv(max(head.counts.num_tokens for head in packed.heads), _CHUNK), 1)
    ranges = torch.empty(num_heads, num_chunks, 2, block_d, dtype=torch.float32, device=device)
    shape = {"D": head_dim, "BLOCK_D": block_d, "BLOCK_T": _tile_tokens(block_d), "FIELDS": ENTRY_FIELDS}
    _key_ranges_kernel[(num_heads, num_chunks)](
        keys, positions, entries, ranges, keys.stride(0), keys.stride(1), **shape, CHUNK=_CHUNK, num_warps=4
    )
    _key_headers_kernel[(num_heads,)](
        ranges, words, halves, entries, refused, num_chunks,
        BLOCK_D=block_d, FIELDS=ENTRY_FIELDS, num_warps=4,
    )  # fmt: skip
    if key_items:
        _pack_keys_kernel[(len(key_items),)](
            keys, words, positions, halves, entries, of_keys, keys.stride(0), keys.stride(1),
            BLOCK_C=32, FIELDS=ENTRY_FIELDS, num_warps=4,
        )  # fmt: skip
        _pack_values_kernel[(len(value_items),)](
            values, buffer, halves, positions, halves, entries, of_values,
            values.stride(0), values.stride(1), **shape, num_warps=4,
        )  # fmt: skip
    # scales and 16-bit rows of V lie side by side; NaN is its own extreme
    (start, scales), (_, rows) = layout.kinds["scales"], layout.kinds["rows"]
    low, high = buffer[start : start + scales + rows].view(torch.float16).aminmax()
    num_refused, lowest, highest = torch.stack([refused.sum(), low, high]).tolist()
    if num_refused or not (-math.inf < lowest and highest < math.inf):
        raise ValueError(
            "rows have a value that is not finite in float16, or too large for its width; all must be within "
            "+-65504"
        )


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
