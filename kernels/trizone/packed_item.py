"""One item of TriZone's packed zones: the tokens of one V width in full token blocks of one head."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.split_attention import log_sum, store_part
from kvferry.kernels.trizone.key_logits import key_logits, side_by_side
from kvferry.kernels.trizone.scaled_queries import power_of_two
from kvferry.kernels.trizone.value_sums import add_values


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
