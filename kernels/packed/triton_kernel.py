"""Laying out, quantising and packing a layer in Triton, without the host: six launches of these kernels and
two sorts a layer.

How many rows of each width there are is known only on the device. Memory and grids are therefore sized by a
bound, and programs beyond the counts end at once. Heads have different numbers of tokens at different widths;
what a program takes has about equal bytes. The result equals the torch path's bit by bit: ranges are exact,
divisions and roundings are IEEE's.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.packed.key_words import BLOCK_TOKENS, WIDTHS
from kvferry.kernels.packed.layer import ENTRY_FIELDS
from kvferry.kernels.packed.layout import Bound, position_dtype
from kvferry.kernels.packed.packing_kernels import _pack_keys_kernel, _pack_values_kernel, _refuse_kernel
from kvferry.kernels.packed.placing_kernels import _count_widths_kernel, _index_kernel, _place_kernel

ITEM_BYTES = 64 << 10
"""About how many bytes of V a program reads."""
_CHUNK = 512
"""Tokens whose positions one program writes."""
_REFUSING = 64
"""Programs that look for values that are not finite."""
_FIELDS = ENTRY_FIELDS + 1
"""A head's row for the kernels: as of `packed_entries`, and where its positions go in the layer. Column 19 is
their place among those for the kernels, which are int32 whatever they are stored as, so that each kernel is
compiled once."""
REPORT_COLUMNS = 9
"""A head's channels of 2, 4, 8 and 16 bits, its tokens of each, and its units of other widths. In the row
after the last head: whether the bits mean something, whether all fits, and how much is not finite."""


def pack(
    keys: Tensor, values: Tensor, key_bits: Tensor, value_bits: Tensor, usable: Tensor | None, bound: Bound
) -> tuple[Tensor, Tensor]:
    """Queue a layer's packing.

    Args: keys, values: `[H_kv, T, D]`, rows' elements contiguous; the others as of `begin_packing`.

    Returns: int32 `[H_kv + 1, REPORT_COLUMNS]`, what was found; uint8 `[bound.size_bytes]`, which begins with
        the layer's bytes if that refuses nothing.
    """
    device, (num_heads, num_tokens, head_dim) = keys.device, keys.shape
    report = torch.empty(num_heads + 1, REPORT_COLUMNS, dtype=torch.int32, device=device)
    buffer = torch.zeros(bound.size_bytes, dtype=torch.uint8, device=device)
    entries = torch.empty(num_heads, _FIELDS, dtype=torch.int64, device=device)
    key_bits, value_bits = key_bits.contiguous(), value_bits.contiguous()
    usable = torch.ones((), dtype=torch.bool, device=device) if usable is None else usable
    _count_widths_kernel[(num_heads,)](
        key_bits, value_bits, report, head_dim, num_tokens,
        COLUMNS=REPORT_COLUMNS, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    is_short = position_dtype(num_tokens) == torch.uint16
    _place_kernel[(1,)](
        report, usable.view(torch.uint8), entries, num_heads, bound.size_bytes, bound.tokens,
        D=head_dim, BLOCK_H=max(triton.next_power_of_2(num_heads), 16), COLUMNS=REPORT_COLUMNS,
        FIELDS=_FIELDS, POSITION_BYTES=2 if is_short else 4, num_warps=1,
    )  # fmt: skip
    channels, tokens = (bits.sort(dim=1, stable=True).indices for bits in (key_bits, value_bits))
    positions = torch.empty(num_heads, bound.tokens, dtype=torch.int32, device=device)
    words, halves, ints = (buffer.view(dtype) for dtype in (torch.int16, torch.float16, torch.int32))
    block_d = max(triton.next_power_of_2(head_dim), 16)
    _index_kernel[(num_heads, max(triton.cdiv(bound.tokens, _CHUNK), 1))](
        channels, tokens, words, ints, positions, entries, num_tokens,
        D=head_dim, BLOCK_D=block_d, BLOCK=_CHUNK, FIELDS=_FIELDS, LONG=not is_short, num_warps=4,
    )  # fmt: skip
    refused = report[-1, 2:]
    _pack_keys_kernel[(num_heads, max(triton.cdiv(bound.tokens, BLOCK_TOKENS), 1))](
        keys, words, positions, halves, entries, refused, keys.stride(0), keys.stride(1),
        BLOCK_C=32, FIELDS=_FIELDS, num_warps=4,
    )  # fmt: skip
    item_tokens = max(ITEM_BYTES // (head_dim * keys.element_size()), 1)
    _pack_values_kernel[(num_heads, len(WIDTHS), max(triton.cdiv(bound.tokens, item_tokens), 1))](
        values, buffer, halves, positions, halves, entries, item_tokens,
        values.stride(0), values.stride(1),
        D=head_dim, BLOCK_D=block_d, BLOCK_T=_tile_tokens(block_d), FIELDS=_FIELDS, num_warps=4,
    )  # fmt: skip
    _refuse_kernel[(_REFUSING,)](halves, entries, refused, BLOCK=1024, num_warps=4)
    return report, buffer


def _tile_tokens(block_d: int) -> int:
    """Choose tokens per tile: 64 bytes of 16-bit rows for each of 128 threads; more in the interpreter."""
    return 128 if interpreting() else min(4096 // block_d, 64)
