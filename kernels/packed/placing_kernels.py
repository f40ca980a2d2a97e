"""Laying out a packed layer in Triton, so that the host need not know how many rows of each width there are.

    _count_widths_kernel  (head): channels and tokens of each width
    _place_kernel         (one program): the offsets of `layout.py`, if everything fits
    _index_kernel         (head, chunk of tokens): channels and positions in packed order

Imported only by `triton_kernel.py`, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _count_widths(bits_ptr, out_ptr, num_units, BLOCK: tl.constexpr):
    """Store how many units have 2, 4, 8 and 16 bits; return how many have another width that is not 0."""
    i = tl.arange(0, BLOCK)
    two, four = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    eight, sixteen = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    none = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_units, BLOCK):
        bits = tl.load(bits_ptr + start + i, mask=start + i < num_units, other=0).to(tl.int32)
        none += (bits == 0).to(tl.int32)
        two += (bits == 2).to(tl.int32)
        four += (bits == 4).to(tl.int32)
        eight += (bits == 8).to(tl.int32)
        sixteen += (bits == 16).to(tl.int32)
    n2, n4, n8, n16 = tl.sum(two, 0), tl.sum(four, 0), tl.sum(eight, 0), tl.sum(sixteen, 0)
    tl.store(out_ptr, n2)
    tl.store(out_ptr + 1, n4)
    tl.store(out_ptr + 2, n8)
    tl.store(out_ptr + 3, n16)
    # what is beyond the end counts as 0 bits
    return tl.cdiv(num_units, BLOCK) * BLOCK - tl.sum(none, 0) - n2 - n4 - n8 - n16


@triton.jit
def _count_widths_kernel(
    key_bits_ptr, value_bits_ptr, report_ptr, num_channels, num_tokens,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = report_ptr + head * COLUMNS
    other = _count_widths(key_bits_ptr + head * num_channels, row, num_channels, BLOCK)
    other += _count_widths(value_bits_ptr + head * num_tokens, row + 4, num_tokens, BLOCK)
    tl.store(row + 8, other)


@triton.jit
def _padded(num_bytes):
    return (num_bytes + 15) // 16 * 16


@triton.jit
def _place_kernel(
    report_ptr, usable_ptr, entries_ptr, num_heads, limit_bytes, max_tokens,
    D: tl.constexpr, BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr,
    POSITION_BYTES: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, BLOCK_H)
    there = h < num_heads
    of_head = report_ptr + h * COLUMNS
    t2, t4 = (
        tl.load(of_head + 4, mask=there, other=0).to(tl.int64),
        tl.load(of_head + 5, mask=there, other=0).to(tl.int64),
    )
    t8, t16 = (
        tl.load(of_head + 6, mask=there, other=0).to(tl.int64),
        tl.load(of_head + 7, mask=there, other=0).to(tl.int64),
    )
    n = t2 + t4 + t8 + t16
    # without tokens there are no channels to store
    stored = there & (n > 0)
    c2, c4 = (
        tl.load(of_head, mask=stored, other=0).to(tl.int64),
        tl.load(of_head + 1, mask=stored, other=0).to(tl.int64),
    )
    c8, c16 = (
        tl.load(of_head + 2, mask=stored, other=0).to(tl.int64),
        tl.load(of_head + 3, mask=stored, other=0).to(tl.int64),
    )
    words = _padded((n + 7) // 8 * (2 * c2 + 4 * c4 + 8 * c8 + 16 * c16))
    rows_2, rows_4, rows_8 = _padded(t2 * (D // 4)), _padded(t4 * (D // 2)), _padded(t8 * D)
    of_channels, of_tokens = _padded(2 * ((n + 63) // 64) * (c2 + c4 + c8)), _padded(2 * (t2 + t4 + t8))
    rows_16 = _padded(2 * t16 * D)
    channels, positions = _padded(2 * (c2 + c4 + c8 + c16)), _padded(POSITION_BYTES * n)
    codes, scales = words + rows_2 + rows_4 + rows_8, 2 * of_channels + 2 * of_tokens
    scales_start = tl.sum(codes, 0)
    rows_start = scales_start + tl.sum(scales, 0)
    index_start = rows_start + tl.sum(rows_16, 0)
    size_bytes = index_start + tl.sum(channels + positions, 0)
    codes = tl.cumsum(codes, 0) - codes
    scales = scales_start + tl.cumsum(scales, 0) - scales
    rows_16 = rows_start + tl.cumsum(rows_16, 0) - rows_16
    index = index_start + tl.cumsum(channels + positions, 0) - channels - positions
    other = tl.sum(tl.load(of_head + 8, mask=there, other=0), 0)
    usable = tl.load(usable_ptr).to(tl.int32)
    fits = (size_bytes <= limit_bytes) & (tl.max(n, 0) <= max_tokens)
    tl.store(report_ptr + num_heads * COLUMNS, usable)
    tl.store(report_ptr + num_heads * COLUMNS + 1, fits.to(tl.int32))
    # packing adds what it refuses
    tl.store(report_ptr + num_heads * COLUMNS + 2, 0)
    # nothing is written of a layer that is refused
    valid = (fits & (usable != 0) & (other == 0)).to(tl.int64)
    at = entries_ptr + h * FIELDS
    tl.store(at + 1, c2 * valid, mask=there)
    tl.store(at + 2, c4 * valid, mask=there)
    tl.store(at + 3, c8 * valid, mask=there)
    tl.store(at + 4, c16 * valid, mask=there)
    tl.store(at + 5, t2 * valid, mask=there)
    tl.store(at + 6, t4 * valid, mask=there)
    tl.store(at + 7, t8 * valid, mask=there)
    tl.store(at + 8, t16 * valid, mask=there)
    tl.store(at + 9, codes * valid // 2, mask=there)
    tl.store(at + 10, index * valid // 2, mask=there)
    tl.store(at + 11, scales * valid // 2, mask=there)
    tl.store(at + 12, (scales + of_channels) * valid // 2, mask=there)
    tl.store(at + 13, (scales + 2 * of_channels) * valid // 2, mask=there)
    tl.store(at + 14, (scales + 2 * of_channels + of_tokens) * valid // 2, mask=there)
    tl.store(at + 15, (codes + words) * valid // 2, mask=there)
    tl.store(at + 16, (codes + words + rows_2) * valid // 2, mask=there)
    tl.store(at + 17, (codes + words + rows_2 + rows_4) * valid // 2, mask=there)
    tl.store(at + 18, rows_16 * valid // 2, mask=there)
    tl.store(at + 19, h.to(tl.int64) * max_tokens, mask=there)
    tl.store(at + 20, (index + channels) * valid // 2, mask=there)


@triton.jit
def _index_kernel(
    channel_order_ptr, token_order_ptr, words_ptr, ints_ptr, positions_ptr, entries_ptr, num_tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = entries_ptr + head * FIELDS
    n = (tl.load(row + 5) + tl.load(row + 6) + tl.load(row + 7) + tl.load(row + 8)).to(tl.int32)
    t = chunk * BLOCK + tl.arange(0, BLOCK)
    # units of 0 bits sort first
    token = tl.load(token_order_ptr + head * num_tokens + (num_tokens - n) + t, mask=t < n, other=0)
    tl.store(positions_ptr + tl.load(row + 19) + t, token.to(tl.int32), mask=t < n)
    if LONG:
        tl.store(ints_ptr + tl.load(row + 20) // 2 + t, token.to(tl.int32), mask=t < n)
    else:
        tl.store(words_ptr + tl.load(row + 20) + t, token.to(tl.int16), mask=t < n)
    if chunk == 0:
        c = tl.arange(0, BLOCK_D)
        count = (tl.load(row + 1) + tl.load(row + 2) + tl.load(row + 3) + tl.load(row + 4)).to(tl.int32)
        channel = tl.load(channel_order_ptr + head * D + (D - count) + c, mask=c < count, other=0)
        tl.store(words_ptr + tl.load(row + 10) + c, channel.to(tl.int16), mask=c < count)
