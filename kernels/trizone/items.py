"""The items of TriZone's work list, each one program's share of a head.

packed_item  the tokens of one V width in full token blocks
tail_item    fields of a head's last, shorter token block, with all widths
rows_item    a split of a head's unpacked rows (zone C)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.split_attention import attend_tile, load_queries, log_sum, split_range, store_part
from kvferry.kernels.trizone.codes import add_values, key_logits, side_by_side
from kvferry.kernels.trizone.scaled_queries import power_of_two, queries_of


@triton.jit
def _tile(
    scaled_ptr, statistics_ptr, halves_ptr, words_ptr, floats_ptr, row, first, end, zone_start, zone_stop,
    rows, scales, minima, norm, j, highest, total, lowest, a0, a1, a2, a3, a4, a5, a6, a7,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    VB: tl.constexpr, ROW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over the zone's tokens of BLOCK_N lanes from `first`, up to block `end`."""
    g, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    lane = first + n
    n2, n4 = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    n8, n16 = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    statistics = statistics_ptr + g * 8
    s0, s1, s2, s3, s4, s5, s6, s7 = key_logits(
        scaled_ptr, halves_ptr, words_ptr, tl.multiple_of(tl.load(row + 9), 8), n2, n4, n8, n16,
        tl.load(statistics + 6)[:, None], lane // 16, lane % 16, lane // 16 < end, g,
        BLOCK_D, BLOCK_G, BLOCK_N, BLOCK_C, ASM,
    )  # fmt: skip
    b0, b1 = tl.load(statistics)[:, None], tl.load(statistics + 1)[:, None]
    b2, b3 = tl.load(statistics + 2)[:, None], tl.load(statistics + 3)[:, None]
    undo, shift = tl.load(statistics + 4)[:, None], tl.load(statistics + 5)[:, None]
    if VB == 2:
        # as in `add_values`: frees the registers of the logits' parts first
        tl.debug_barrier()
    logits = side_by_side(
        s0 - b0, s1 - b1, s2 - b2, s3 - b3, s4 - b0, s5 - b1, s6 - b2, s7 - b3, BLOCK_G, BLOCK_N
    )  # fmt: skip
    i = tl.arange(0, 8 * BLOCK_N)
    # field f of a block's lane r is its token 16 f + r
    lane = first + i // 8
    token = (lane // 16) * 128 + (i % 8) * 16 + lane % 16
    ok = (lane // 16 < end) & (token >= zone_start) & (token < zone_stop)
    logits = tl.where(ok[None, :], logits * undo + shift, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(logits, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink = tl.exp2(highest - base)
    p = tl.exp2(logits - base[:, None])
    total = total * shrink + tl.sum(p, 1)
    lowest *= shrink
    # accumulators that the width does not use take no registers
    a0 *= shrink[:, None]
    if VB < 16:
        a4 *= shrink[:, None]
    if VB < 8:
        a1, a5 = a1 * shrink[:, None], a5 * shrink[:, None]
    if VB < 4:
        a2, a3 = a2 * shrink[:, None], a3 * shrink[:, None]
        a6, a7 = a6 * shrink[:, None], a7 * shrink[:, None]
    lowest, a0, a1, a2, a3, a4, a5, a6, a7 = add_values(
        p, token - zone_start, ok, halves_ptr, words_ptr, floats_ptr, rows, scales, minima, norm, j, lowest,
        a0, a1, a2, a3, a4, a5, a6, a7, VB, ROW, ASM,
    )  # fmt: skip
    return new_highest, total, lowest, a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def packed_item(
    scaled_ptr, statistics_ptr, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
    slot, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, VB: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The tokens with VB bits of V in full token blocks begin .. end of the entry at `row`."""
    PER_WORD: tl.constexpr = 16 // VB
    ROW: tl.constexpr = D // PER_WORD
    BLOCK_W: tl.constexpr = BLOCK_D // PER_WORD
    t2, t4, t8 = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    if VB == 2:
        zone_start, zone_stop, field = 0, t2.to(tl.int32), 15
    elif VB == 4:
        zone_start, zone_stop, field = t2.to(tl.int32), (t2 + t4).to(tl.int32), 16
    elif VB == 8:
        zone_start, zone_stop, field = (t2 + t4).to(tl.int32), (t2 + t4 + t8).to(tl.int32), 17
    else:
        zone_start, field = (t2 + t4 + t8).to(tl.int32), 18
        zone_stop = zone_start + tl.load(row + 8).to(tl.int32)
    rows = tl.multiple_of(tl.load(row + field), 8)
    scales, minima = tl.load(row + 13) + zone_start, tl.load(row + 14) + zone_start
    exponent = tl.load(row + 20).to(tl.int32)
    norm = power_of_two(exponent)
    g, j = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_W)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    lowest = tl.zeros([BLOCK_G], tl.float32)
    a0 = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    for first in range(begin * 16, end * 16, BLOCK_N):
        highest, total, lowest, a0, a1, a2, a3, a4, a5, a6, a7 = _tile(
            scaled_ptr, statistics_ptr, halves_ptr, words_ptr, floats_ptr, row,
            tl.multiple_of(first, BLOCK_N), end, zone_start, zone_stop, rows, scales, minima, norm, j,
            highest, total, lowest, a0, a1, a2, a3, a4, a5, a6, a7,
            BLOCK_G, BLOCK_D, BLOCK_N, BLOCK_C, VB, ROW, ASM,
        )  # fmt: skip
    share = (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    inside = j < ROW
    if VB == 16:
        store_part(partial_ptr, slot, a0 * share, g, j, inside, G, D)
    else:
        # a byte has channels i, i + stride, ...; a word the bytes 2 j and 2 j + 1
        STRIDE: tl.constexpr = D * VB // 8
        unit = share * (1024.0 * power_of_two(-exponent))
        low = lowest[:, None] * share
        store_part(partial_ptr, slot, a0 * unit + low, g, 2 * j, inside, G, D)
        store_part(partial_ptr, slot, a4 * unit + low, g, 2 * j + 1, inside, G, D)
        if VB < 8:
            unit_1 = unit / (1 << VB)
            store_part(partial_ptr, slot, a1 * unit_1 + low, g, 2 * j + STRIDE, inside, G, D)
            store_part(partial_ptr, slot, a5 * unit_1 + low, g, 2 * j + 1 + STRIDE, inside, G, D)
        if VB == 2:
            unit_2, unit_3 = unit / 16, unit / 64
            store_part(partial_ptr, slot, a2 * unit_2 + low, g, 2 * j + 2 * STRIDE, inside, G, D)
            store_part(partial_ptr, slot, a6 * unit_2 + low, g, 2 * j + 1 + 2 * STRIDE, inside, G, D)
            store_part(partial_ptr, slot, a3 * unit_3 + low, g, 2 * j + 3 * STRIDE, inside, G, D)
            store_part(partial_ptr, slot, a7 * unit_3 + low, g, 2 * j + 1 + 3 * STRIDE, inside, G, D)
    tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)


@triton.jit
def _tail_logits(
    scaled_ptr, statistics, words_ptr, row, full, lanes, f, g, r, ok,
    BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_G, 16]` logits of field f of the short block, whose lanes are fewer than 16; any widths."""
    n2, n4 = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    n8, n16 = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    coded = n2 + n4 + n8
    start = tl.load(row + 9) + full * (16 * (n2 + 2 * n4 + 4 * n8 + 8 * n16))
    of_codes = tl.zeros([BLOCK_G, 16], tl.float32)
    of_halves = of_codes
    for c0 in range(0, coded + n16, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        # width 2^log_width, and the words (of 16 lanes) of the channels before it
        log_width = tl.where(c < n2, 1, tl.where(c < n2 + n4, 2, tl.where(c < coded, 3, 4)))
        before = tl.where(
            c < n2, c, tl.where(c < n2 + n4, 2 * c - n2, tl.where(c < coded, 4 * c - 3 * n2 - 2 * n4, 0))
        )
        before = tl.where(c < coded, before, 8 * c - 7 * n2 - 6 * n4 - 4 * n8)
        at = (before + (f >> (4 - log_width)))[:, None] * lanes + r[None, :]
        mask = (c < coded + n16)[:, None] & ok[None, :]
        word = tl.load(words_ptr + start + at, mask=mask, other=0).to(tl.int32) & 0xFFFF
        bit = (f & ((16 >> log_width) - 1)) << log_width
        code = (word >> bit[:, None]) & ((1 << (1 << log_width)) - 1)[:, None]
        half = (code & 0x3FF | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
        whole = word.to(tl.int16).to(tl.float16, bitcast=True)
        q = queries_of(scaled_ptr, g, c, c < coded, BLOCK_D)
        of_codes = tl.dot(q, tl.where((c < coded)[:, None], half, 0.0), of_codes)
        q = queries_of(scaled_ptr, g, c, (c >= coded) & (c < coded + n16), BLOCK_D)
        of_halves = tl.dot(q, tl.where((c >= coded)[:, None], whole, 0.0), of_halves)
    undo, shift = tl.load(statistics + 4)[:, None], tl.load(statistics + 5)[:, None]
    ratio = tl.load(statistics + 6)[:, None]
    return (of_codes * (1.0 / 1024.0) + of_halves * ratio) * undo + shift


@triton.jit
def _tail_values(halves_ptr, bytes_ptr, floats_ptr, row, token, ok, d, D: tl.constexpr):
    """Float32 `[16, BLOCK_D]` V rows of some tokens, of any widths, zero where not ok."""
    t2, t4 = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    t8 = tl.load(row + 7).to(tl.int32)
    coded = t2 + t4 + t8
    log_width = tl.where(token < t2, 1, tl.where(token < t2 + t4, 2, 3))[:, None]
    stride = (D << log_width) // 8
    # the field of a byte that has channel d
    field = (d[None, :] >= stride).to(tl.int32) + (d[None, :] >= 2 * stride).to(tl.int32)
    field += (d[None, :] >= 3 * stride).to(tl.int32)
    place = tl.where(
        token < t2, tl.load(row + 15) * 2 + token.to(tl.int64) * (D // 4),
        tl.where(
            token < t2 + t4, tl.load(row + 16) * 2 + (token - t2).to(tl.int64) * (D // 2),
            tl.load(row + 17) * 2 + (token - t2 - t4).to(tl.int64) * D,
        ),
    )  # fmt: skip
    inside = ok[:, None] & (d[None, :] < D)
    is_code = (token < coded)[:, None]
    octet = tl.load(bytes_ptr + place[:, None] + d[None, :] - field * stride, mask=inside & is_code, other=0)
    code = (octet.to(tl.int32) >> (field << log_width)) & ((1 << (1 << log_width)) - 1)
    half = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    scale = tl.load(floats_ptr + tl.load(row + 13) + token, mask=ok & (token < coded), other=0.0).to(
        tl.float32
    )
    minimum = tl.load(floats_ptr + tl.load(row + 14) + token, mask=ok & (token < coded), other=0.0).to(
        tl.float32
    )
    rows = tl.load(row + 18) + (token - coded).to(tl.int64)[:, None] * D + d[None, :]
    whole = tl.load(halves_ptr + rows, mask=inside & ~is_code, other=0.0).to(tl.float32)
    return half.to(tl.float32) * scale[:, None] + minimum[:, None] + whole


@triton.jit
def tail_item(
    scaled_ptr, statistics_ptr, halves_ptr, words_ptr, bytes_ptr, floats_ptr, row, begin, end, partial_ptr,
    lse_ptr, slot, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Fields begin .. end of the last, shorter block of the entry at `row`: at most 127 tokens, of all widths,
    in 8 fields."""
    num_tokens = (tl.load(row + 5) + tl.load(row + 6) + tl.load(row + 7) + tl.load(row + 8)).to(tl.int32)
    full = num_tokens // 128
    lanes = (num_tokens - full * 128 + 7) // 8
    g, r, d = tl.arange(0, BLOCK_G), tl.arange(0, 16), tl.arange(0, BLOCK_D)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for f in range(begin, end):
        token = full * 128 + f * lanes + r
        ok = (r < lanes) & (token < num_tokens)
        logits = _tail_logits(
            scaled_ptr, statistics_ptr + g * 8, words_ptr, row, full, lanes, f, g, r, r < lanes,
            BLOCK_D, BLOCK_G, BLOCK_C,
        )  # fmt: skip
        logits = tl.where(ok[None, :], logits, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink, p = tl.exp2(highest - base), tl.exp2(logits - base[:, None])
        v = _tail_values(halves_ptr, bytes_ptr, floats_ptr, row, token, ok, d, D)
        total = total * shrink + tl.sum(p, 1)
        # plain tf32 is not exact enough
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="tf32x3")
        highest = new_highest
    store_part(partial_ptr, slot, acc / tl.where(total > 0, total, 1.0)[:, None], g, d, d < D, G, D)
    tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)


@triton.jit
def rows_item(
    query_ptr, key_ptr, value_ptr, heads_ptr, bh, split, num_splits, stride_row, scale_log2, partial_ptr,
    lse_ptr, slot, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, HEAD_FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One split of a head's unpacked rows (zone C)."""
    key_offset = tl.multiple_of(tl.load(heads_ptr + bh * HEAD_FIELDS), ALIGN)
    value_offset = tl.multiple_of(tl.load(heads_ptr + bh * HEAD_FIELDS + 1), ALIGN)
    length = tl.load(heads_ptr + bh * HEAD_FIELDS + 2).to(tl.int32)
    begin, end, _ = split_range(tl.cdiv(length, BLOCK_R), split, num_splits, 1)
    g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    q = load_queries(query_ptr, bh, g, d, G, D, DOT)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in range(begin, end):
        token = tile * BLOCK_R + n
        ok = token < length
        at = token.to(tl.int64)[:, None] * stride_row + d[None, :]
        mask = ok[:, None] & (d[None, :] < D)
        k = tl.load(key_ptr + key_offset + at, mask=mask, other=0.0).to(DOT)
        v = tl.load(value_ptr + value_offset + at, mask=mask, other=0.0).to(DOT)
        highest, total, acc = attend_tile(q, k, v, ok, highest, total, acc, scale_log2)
    store_part(partial_ptr, slot, acc / tl.where(total > 0, total, 1.0)[:, None], g, d, d < D, G, D)
    tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)
