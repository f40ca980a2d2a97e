"""Packing K and V in Triton.

    _pack_keys_kernel    (head, token block): each channel's range in the block's groups, then its codes
    _pack_values_kernel  (head, width, item): each row's range, then its codes; some tokens of one width
    _refuse_kernel       (part): what is not finite of scales, minima and rows at 16 bits

Each writes what the head's counts on the device ask for, whatever the number of programs.

Imported only by `triton_kernel.py`, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _nearest(x):
    """Round 0 <= x < 2^22 to the nearest integer, half to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def codes_of(x, minimum, scale, LEVELS: tl.constexpr):
    """Quantise x to integers 0 .. LEVELS: `round((x - minimum) / scale)`."""
    steps = _nearest(tl.div_rn(x - minimum, scale))
    return tl.minimum(tl.maximum(steps, 0.0), LEVELS).to(tl.int32)


@triton.jit
def _half_headers(lowest, highest, levels):
    """Compute `quantise.half_headers`; products with a power of two are exact. Returns scale and minimum."""
    nearest = lowest.to(tl.float16)
    below = (lowest - tl.abs(lowest) * 0.0009765625).to(tl.float16)
    minimum = tl.where(nearest.to(tl.float32) <= lowest, nearest, below)
    scale = tl.div_rn(highest - minimum.to(tl.float32), levels)
    half_scale = (scale + scale * 0.0009765625).to(tl.float16)
    return tl.where(half_scale.to(tl.float32) > 0, half_scale, 1.0).to(tl.float16), minimum


@triton.jit
def _not_finite(x):
    """Return whether a value is infinite or NaN."""
    return (x == x) & (tl.abs(x) < float("inf")) == 0


@triton.jit
def _group_range(keys_ptr, ints_ptr, row, channel, inside, start, lanes, num_tokens, stride_row):
    """Return the range of some channels in four rows of `lanes` tokens from `start` on: lowest, highest."""
    i = tl.arange(0, 64)
    t = start + i // 16 * lanes + i % 16
    there = (i % 16 < lanes) & (t < num_tokens)
    position = tl.load(ints_ptr + tl.load(row + 19) + t, mask=there, other=0).to(tl.int64)
    ok = there[:, None] & inside[None, :]
    at = position[:, None] * stride_row + channel[None, :]
    x = tl.load(keys_ptr + at, mask=ok, other=0.0).to(tl.float32)
    # a maximum ignores NaN, so NaN becomes infinity, which is refused later
    highest = tl.max(tl.where(ok, tl.where(x == x, x, float("inf")), float("-inf")), 0)
    lowest = tl.min(tl.where(ok, tl.where(x == x, x, float("-inf")), float("inf")), 0)
    return lowest, highest


@triton.jit
def _pack_key_words(
    keys_ptr, words_ptr, ints_ptr, floats_ptr, row, base, before, first, count, coded, block, lanes,
    num_tokens, stride_row, BLOCK_C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Pack the words of one block and width, with the scales and minima of its groups.

    Args: base: the block's first word; before: words per lane before those of the width; first, count: its
        channels in packed order; coded: all channels below 16 bits.
    Returns: how many of its values at 16 bits are not finite.
    """
    FIELDS: tl.constexpr = 16 // W
    r = tl.arange(0, 16)
    bad = 0
    for c0 in range(0, count, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        inside = c < count
        channel = tl.load(words_ptr + tl.load(row + 10) + first + c, mask=inside, other=0).to(tl.int64)
        if W < 16:
            token = block * 128
            lowest, highest = _group_range(
                keys_ptr, ints_ptr, row, channel, inside, token, lanes, num_tokens, stride_row
            )
            lowest_2, highest_2 = _group_range(
                keys_ptr, ints_ptr, row, channel, inside, token + 4 * lanes, lanes, num_tokens, stride_row
            )
            # a rest this short is one group
            is_one = num_tokens - token <= 64
            lowest = tl.where(is_one, tl.minimum(lowest, lowest_2), lowest)
            highest = tl.where(is_one, tl.maximum(highest, highest_2), highest)
            lowest_2, highest_2 = tl.where(is_one, lowest, lowest_2), tl.where(is_one, highest, highest_2)
            levels = tl.full([BLOCK_C], (1 << W) - 1, tl.float32)
            scale, minimum = _half_headers(
                tl.where(inside, lowest, 0.0), tl.where(inside, highest, 0.0), levels
            )
            scale_2, minimum_2 = _half_headers(
                tl.where(inside, lowest_2, 0.0), tl.where(inside, highest_2, 0.0), levels
            )
            header = 2 * block * coded + first + c
            tl.store(floats_ptr + tl.load(row + 11) + header, scale, mask=inside)
            tl.store(floats_ptr + tl.load(row + 12) + header, minimum, mask=inside)
            has_second = inside & (is_one == 0)
            tl.store(floats_ptr + tl.load(row + 11) + header + coded, scale_2, mask=has_second)
            tl.store(floats_ptr + tl.load(row + 12) + header + coded, minimum_2, mask=has_second)
        wrong = tl.zeros([BLOCK_C, 16], tl.int32)
        for j in range(0, W // 2):
            word = tl.zeros([BLOCK_C, 16], tl.int32)
            for f in tl.static_range(FIELDS):
                field = j * FIELDS + f
                t = block * 128 + field * lanes + r
                there = (r < lanes) & (t < num_tokens)
                position = tl.load(ints_ptr + tl.load(row + 19) + t, mask=there, other=0).to(tl.int64)
                ok = inside[:, None] & there[None, :]
                at = position[None, :] * stride_row + channel[:, None]
                x = tl.load(keys_ptr + at, mask=ok, other=0.0).to(tl.float32)
                if W == 16:
                    half = x.to(tl.float16)
                    wrong += _not_finite(half.to(tl.float32)).to(tl.int32)
                    word = half.to(tl.int16, bitcast=True).to(tl.int32)
                else:
                    of_scale = tl.where(field < 4, scale, scale_2).to(tl.float32)[:, None]
                    of_minimum = tl.where(field < 4, minimum, minimum_2).to(tl.float32)[:, None]
                    code = codes_of(x, of_minimum, of_scale, (1 << W) - 1)
                    word |= tl.where(ok, code, 0) << (f * W)
            at = base + lanes * before + (c[:, None] * (W // 2) + j) * lanes + r[None, :]
            tl.store(words_ptr + at, word.to(tl.int16), mask=inside[:, None] & (r < lanes)[None, :])
        if W == 16:
            bad += tl.sum(tl.sum(wrong, 1), 0)
    return bad


@triton.jit
def _pack_keys_kernel(
    key_ptr, words_ptr, ints_ptr, floats_ptr, entries_ptr, refused_ptr, stride_head, stride_row,
    BLOCK_C: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = entries_ptr + head * FIELDS
    n2, n4 = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    n8, n16 = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    num_tokens = (tl.load(row + 5) + tl.load(row + 6) + tl.load(row + 7) + tl.load(row + 8)).to(tl.int32)
    keys_ptr = key_ptr + head * stride_head
    if block * 128 < num_tokens:
        lanes = tl.minimum((num_tokens - block * 128 + 7) // 8, 16)
        base = tl.load(row + 9) + block * (16 * (n2 + 2 * n4 + 4 * n8 + 8 * n16))
        before, first, refused = 0, 0, 0
        for i in tl.static_range(4):
            count = tl.load(row + 1 + i).to(tl.int32)
            bad = _pack_key_words(
                keys_ptr, words_ptr, ints_ptr, floats_ptr, row, base, before, first, count, n2 + n4 + n8,
                block, lanes, num_tokens, stride_row, BLOCK_C, 2 ** (i + 1),
            )  # fmt: skip
            before, first, refused = before + (count << i), first + count, refused + bad
        if refused > 0:
            tl.atomic_add(refused_ptr, refused)


@triton.jit
def _pack_rows(
    values_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, row, start, rows, begin, end, stride_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Pack tokens begin .. end of the zone that starts at packed token `start`; rows: its element offset."""
    for t0 in range(begin, end, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        there = t < end
        position = tl.load(ints_ptr + tl.load(row + 19) + start + t, mask=there, other=0).to(tl.int64)
        if W == 16:
            d = tl.arange(0, BLOCK_D)
            ok = there[:, None] & (d[None, :] < D)
            x = tl.load(values_ptr + position[:, None] * stride_row + d[None, :], mask=ok, other=0.0)
            at = rows + t.to(tl.int64)[:, None] * D + d[None, :]
            x = x.to(tl.float32)
            # NaN, and what would round to infinity, is refused afterwards
            x = tl.where(tl.abs(x) < 65520.0, x, float("inf"))
            tl.store(halves_ptr + at, x.to(tl.float16), mask=ok)
        else:
            PER_BYTE: tl.constexpr = 8 // W
            STRIDE: tl.constexpr = D // PER_BYTE
            i = tl.arange(0, BLOCK_D // PER_BYTE)
            ok = there[:, None] & (i[None, :] < STRIDE)
            from_row = values_ptr + position[:, None] * stride_row + i[None, :]
            lowest = tl.full([BLOCK_T], float("inf"), tl.float32)
            highest = tl.full([BLOCK_T], float("-inf"), tl.float32)
            for p in tl.static_range(PER_BYTE):
                x = tl.load(from_row + p * STRIDE, mask=ok, other=0.0).to(tl.float32)
                top = tl.where(ok, tl.where(x == x, x, float("inf")), float("-inf"))
                bottom = tl.where(ok, tl.where(x == x, x, float("-inf")), float("inf"))
                highest, lowest = tl.maximum(highest, tl.max(top, 1)), tl.minimum(lowest, tl.min(bottom, 1))
            lowest, highest = tl.where(there, lowest, 0.0), tl.where(there, highest, 0.0)
            levels = tl.full([BLOCK_T], (1 << W) - 1, tl.float32)
            half_scale, minimum = _half_headers(lowest, highest, levels)
            scale, lowest = half_scale.to(tl.float32), minimum.to(tl.float32)
            # a row that is refused afterwards has arbitrary codes
            usable = (highest - lowest < float("inf"))[:, None] & (scale < float("inf"))[:, None]
            from_scale = tl.where(usable, scale[:, None], 1.0)
            from_lowest = tl.where(usable, lowest[:, None], 0.0)
            octet = tl.zeros([BLOCK_T, BLOCK_D // PER_BYTE], tl.int32)
            for p in tl.static_range(PER_BYTE):
                x = tl.load(from_row + p * STRIDE, mask=ok, other=0.0).to(tl.float32)
                x = tl.where(ok & usable, x, from_lowest)
                octet |= codes_of(x, from_lowest, from_scale, (1 << W) - 1) << (p * W)
            at = rows + t.to(tl.int64)[:, None] * STRIDE + i[None, :]
            tl.store(bytes_ptr + at, octet.to(tl.uint8), mask=ok)
            tl.store(floats_ptr + tl.load(row + 13) + start + t, half_scale, mask=there)
            tl.store(floats_ptr + tl.load(row + 14) + start + t, minimum, mask=there)


@triton.jit
def _pack_values_kernel(
    value_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, entries_ptr, item_tokens, stride_head, stride_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    head, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.program_id(2) * item_tokens
    row = entries_ptr + head * FIELDS
    values_ptr = value_ptr + head * stride_head
    end = tl.minimum(begin + item_tokens, tl.load(row + 5 + kind).to(tl.int32))
    start = 0
    for i in tl.static_range(4):
        if (kind == i) & (begin < end):
            # offsets of coded rows are in units of int16; here they are converted to bytes
            _pack_rows(
                values_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, row, start,
                tl.load(row + 15 + i) * (2 if i < 3 else 1), begin, end, stride_row, D, BLOCK_D, BLOCK_T,
                2 ** (i + 1),
            )  # fmt: skip
        start += tl.load(row + 5 + i)


@triton.jit
def _refuse_kernel(halves_ptr, entries_ptr, refused_ptr, BLOCK: tl.constexpr):
    """Count what is not finite among all heads' scales, minima and 16-bit rows of V, which are contiguous."""
    first, last = tl.load(entries_ptr + 11), tl.load(entries_ptr + 10)
    step = tl.num_programs(0) * BLOCK
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(first + tl.program_id(0) * BLOCK, last, step):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(halves_ptr + i, mask=i < last, other=0.0).to(tl.float32)
        bad += _not_finite(x).to(tl.int32)
    refused = tl.sum(bad, 0)
    if refused > 0:
        tl.atomic_add(refused_ptr, refused)
