"""TriZone attention in Triton: a prologue, then zones A, B and C of a whole batch in one launch.

    _prologue_kernel  (entry): permutes the queries to the packed channels' order, folds the K scales in,
                      rounds to float16 at a power of two per query head, and sums what the codes' "1" adds
    _trizone_kernel   (item of the work list): logits of packed or unpacked rows, online softmax, V; the last
                      item of a head combines them all

Place of codes: `kernels/packed/key_words.py` and `value_rows.py`. A tile is BLOCK_TILES token blocks of 128:
words `[BLOCK_C, BLOCK_N]` with BLOCK_N = 16 BLOCK_TILES lanes, of which each holds 8 tokens; so there are
eight logit tiles `[BLOCK_G, BLOCK_N]`, of tokens f * lanes + lane of each block, f = 0 .. 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import block_tokens, dot_dtype
from kvferry.kernels.descriptors import ALIGNMENT_BYTES, uniform_heads
from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.split_attention import (
    LOG2_E,
    MIN_BLOCK_G,
    attend_tile,
    combine_if_last,
    load_queries,
    log_sum,
    split_range,
)
from kvferry.kernels.split_workspace import SplitWorkspace, choose_num_splits, split_workspace
from kvferry.kernels.trizone.unpack import code_of, half_of, high_byte
from kvferry.kernels.trizone.work_list import (
    ENTRY_FIELDS,
    ITEM_FIELDS,
    WorkList,
    balanced_item_bytes,
    work_list,
)

STATISTICS = 8
"""float32 a query head: four biases, 2^-e, the minima's term, 2^(e - e16), unused."""
BLOCK_CHANNELS = 64
"""Channels a tile: with 16 words each, 8 bytes for each of 256 threads; four warps spill registers."""


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent_to(size, TARGET: tl.constexpr):
    """The exponent e within +-60 with which size * 2^e lies in [2^TARGET, 2^(TARGET + 1)); 0 for size 0."""
    own = (size.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(size > 0, tl.minimum(tl.maximum(TARGET - own, -60), 60), 0)


@triton.jit
def _prologue_kernel(
    query_ptr, half_words_ptr, floats_ptr, entries_ptr, scaled_ptr, statistics_ptr, scale_log2,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    row = entries_ptr + entry * FIELDS
    bh = tl.load(row)
    n2, n4 = tl.load(row + 1), tl.load(row + 2)
    coded = n2 + n4 + tl.load(row + 3)
    kept = coded + tl.load(row + 4)
    g, c = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    channel = tl.load(half_words_ptr + tl.load(row + 10) + c, mask=c < kept, other=0).to(tl.int32)
    mask = (g[:, None] < G) & (c[None, :] < kept)
    q = tl.load(query_ptr + (bh * G + g[:, None]) * D + channel[None, :], mask=mask, other=0.0)
    q = q.to(tl.float32) * scale_log2
    scale = tl.load(floats_ptr + tl.load(row + 11) + c, mask=c < coded, other=0.0)
    minimum = tl.load(floats_ptr + tl.load(row + 12) + c, mask=c < coded, other=0.0)
    # a code under the lowest mask reads as code / 1024
    of_codes = q * (scale * 1024.0)[None, :]
    of_halves = tl.where(c[None, :] >= coded, q, 0.0)
    exponent = _exponent_to(tl.max(tl.abs(of_codes), 1), 9)
    exponent_16 = _exponent_to(tl.max(tl.abs(of_halves), 1), 9)
    rounded = (of_codes * _power_of_two(exponent)[:, None]).to(tl.float16)
    rounded_16 = (of_halves * _power_of_two(exponent_16)[:, None]).to(tl.float16)
    tl.store(
        scaled_ptr + (entry * BLOCK_G + g[:, None]) * BLOCK_D + c[None, :],
        tl.where(c[None, :] >= coded, rounded_16, rounded),
    )  # fmt: skip
    statistics = statistics_ptr + (entry * BLOCK_G + g) * 8
    for f in tl.static_range(4):
        # of the products as the main kernel rounds them, not of the queries
        by_2, by_4 = (rounded * (0.25**f)).to(tl.float32), (rounded * (0.0625 ** (f % 2))).to(tl.float32)
        used = tl.where(
            (c < n2)[None, :], by_2, tl.where((c < n2 + n4)[None, :], by_4, rounded.to(tl.float32))
        )
        tl.store(statistics + f, tl.sum(used, 1))
    tl.store(statistics + 4, _power_of_two(-exponent))
    tl.store(statistics + 5, tl.sum(q * minimum[None, :], 1))
    tl.store(statistics + 6, _power_of_two(exponent - exponent_16))


@triton.jit
def _queries_of(scaled_ptr, g, c, ok, BLOCK_D: tl.constexpr):
    return tl.load(scaled_ptr + g[:, None] * BLOCK_D + c[None, :], mask=ok[None, :], other=0.0)


@triton.jit
def _logits(
    scaled_ptr, halves_ptr, words_ptr, words, n2, n4, n8, n16, ratio, block, ok, g, nb, r,
    BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Eight tiles of `sum_c q~_c v_c`, v the codes as `half_of` reads them, biases still in."""
    halves_ptr += words
    words_ptr += words
    start = (block + nb) * (16 * (n2 + 2 * n4 + 4 * n8 + 8 * n16)) + r
    c0 = tl.arange(0, BLOCK_C)
    s0 = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    at_16 = start + 16 * (n2 + 2 * n4 + 4 * n8)
    # fewer at a time, because each is eight tiles; 16 are what a product takes at least
    BLOCK_H: tl.constexpr = 16
    c16 = tl.arange(0, BLOCK_H)
    for c in range(0, n16, BLOCK_H):
        inside = c + c16 < n16
        q = _queries_of(scaled_ptr, g, n2 + n4 + n8 + c + c16, inside, BLOCK_D)
        at = at_16[None, :] + (c + c16)[:, None] * 128
        mask = inside[:, None] & ok[None, :]
        s0 = tl.dot(q, tl.load(halves_ptr + at, mask=mask, other=0.0), s0)
        s1 = tl.dot(q, tl.load(halves_ptr + at + 16, mask=mask, other=0.0), s1)
        s2 = tl.dot(q, tl.load(halves_ptr + at + 32, mask=mask, other=0.0), s2)
        s3 = tl.dot(q, tl.load(halves_ptr + at + 48, mask=mask, other=0.0), s3)
        s4 = tl.dot(q, tl.load(halves_ptr + at + 64, mask=mask, other=0.0), s4)
        s5 = tl.dot(q, tl.load(halves_ptr + at + 80, mask=mask, other=0.0), s5)
        s6 = tl.dot(q, tl.load(halves_ptr + at + 96, mask=mask, other=0.0), s6)
        s7 = tl.dot(q, tl.load(halves_ptr + at + 112, mask=mask, other=0.0), s7)
    if n16 > 0:
        # 16-bit channels have a power of two of their own
        s0, s1, s2, s3 = s0 * ratio, s1 * ratio, s2 * ratio, s3 * ratio
        s4, s5, s6, s7 = s4 * ratio, s5 * ratio, s6 * ratio, s7 * ratio
    for c in range(0, n2, BLOCK_C):
        inside = c + c0 < n2
        q = _queries_of(scaled_ptr, g, c + c0, inside, BLOCK_D)
        mask = inside[:, None] & ok[None, :]
        low = tl.load(words_ptr + start[None, :] + (c + c0)[:, None] * 16, mask=mask, other=0)
        high = high_byte(low, ASM)
        q1, q2, q3 = q * 0.25, q * 0.0625, q * 0.015625
        s0 = tl.dot(q, half_of(low, 3, ASM), s0)
        s1 = tl.dot(q1, half_of(low, 12, ASM), s1)
        s2 = tl.dot(q2, half_of(low, 48, ASM), s2)
        s3 = tl.dot(q3, half_of(low, 192, ASM), s3)
        s4 = tl.dot(q, half_of(high, 3, ASM), s4)
        s5 = tl.dot(q1, half_of(high, 12, ASM), s5)
        s6 = tl.dot(q2, half_of(high, 48, ASM), s6)
        s7 = tl.dot(q3, half_of(high, 192, ASM), s7)
    at_4 = start + 16 * n2
    for c in range(0, n4, BLOCK_C):
        inside = c + c0 < n4
        q = _queries_of(scaled_ptr, g, n2 + c + c0, inside, BLOCK_D)
        q1 = q * 0.0625
        at = at_4[None, :] + (c + c0)[:, None] * 32
        mask = inside[:, None] & ok[None, :]
        low = tl.load(words_ptr + at, mask=mask, other=0)
        high = high_byte(low, ASM)
        s0 = tl.dot(q, half_of(low, 15, ASM), s0)
        s1 = tl.dot(q1, half_of(low, 240, ASM), s1)
        s2 = tl.dot(q, half_of(high, 15, ASM), s2)
        s3 = tl.dot(q1, half_of(high, 240, ASM), s3)
        low = tl.load(words_ptr + at + 16, mask=mask, other=0)
        high = high_byte(low, ASM)
        s4 = tl.dot(q, half_of(low, 15, ASM), s4)
        s5 = tl.dot(q1, half_of(low, 240, ASM), s5)
        s6 = tl.dot(q, half_of(high, 15, ASM), s6)
        s7 = tl.dot(q1, half_of(high, 240, ASM), s7)
    at_8 = start + 16 * (n2 + 2 * n4)
    for c in range(0, n8, BLOCK_C):
        inside = c + c0 < n8
        q = _queries_of(scaled_ptr, g, n2 + n4 + c + c0, inside, BLOCK_D)
        at = at_8[None, :] + (c + c0)[:, None] * 64
        mask = inside[:, None] & ok[None, :]
        word = tl.load(words_ptr + at, mask=mask, other=0)
        s0 = tl.dot(q, half_of(word, 255, ASM), s0)
        s1 = tl.dot(q, half_of(high_byte(word, ASM), 255, ASM), s1)
        word = tl.load(words_ptr + at + 16, mask=mask, other=0)
        s2 = tl.dot(q, half_of(word, 255, ASM), s2)
        s3 = tl.dot(q, half_of(high_byte(word, ASM), 255, ASM), s3)
        word = tl.load(words_ptr + at + 32, mask=mask, other=0)
        s4 = tl.dot(q, half_of(word, 255, ASM), s4)
        s5 = tl.dot(q, half_of(high_byte(word, ASM), 255, ASM), s5)
        word = tl.load(words_ptr + at + 48, mask=mask, other=0)
        s6 = tl.dot(q, half_of(word, 255, ASM), s6)
        s7 = tl.dot(q, half_of(high_byte(word, ASM), 255, ASM), s7)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def _add_values(
    p, token, ok, halves_ptr, words_ptr, floats_ptr, rows, scales, minima, norm, j, lowest,
    a0, a1, a2, a3, a4, a5, a6, a7,
    VB: tl.constexpr, ROW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add `sum_t p_t v_t` of one tile's tokens: codes to a0 .. a7, minima to `lowest`.

    Args: p `[BLOCK_G, tokens]`; token `[tokens]`, its place in the zone; ROW: elements a row.
    """
    # counted from the head's first row: 32 bits are enough, and half the registers
    at = token[:, None] * ROW + j[None, :]
    mask = ok[:, None] & (j[None, :] < ROW)
    if VB == 16:
        a0 = tl.dot(p.to(tl.float16), tl.load(halves_ptr + rows + at, mask=mask, other=0.0), a0)
    else:
        scale = tl.load(floats_ptr + scales + token, mask=ok, other=0.0) * norm
        lowest += tl.sum(p * tl.load(floats_ptr + minima + token, mask=ok, other=0.0)[None, :], 1)
        scaled = (p * scale[None, :]).to(tl.float16)
        if VB == 2:
            # eight accumulators: codes must not be unpacked before the minima are done with
            tl.debug_barrier()
        low = tl.load(words_ptr + rows + at, mask=mask, other=0)
        high = high_byte(low, ASM)
        if VB == 2:
            a0 = tl.dot(scaled, code_of(low, 3, ASM), a0)
            a1 = tl.dot(scaled, code_of(low, 12, ASM), a1)
            a2 = tl.dot(scaled, code_of(low, 48, ASM), a2)
            a3 = tl.dot(scaled, code_of(low, 192, ASM), a3)
            a4 = tl.dot(scaled, code_of(high, 3, ASM), a4)
            a5 = tl.dot(scaled, code_of(high, 12, ASM), a5)
            a6 = tl.dot(scaled, code_of(high, 48, ASM), a6)
            a7 = tl.dot(scaled, code_of(high, 192, ASM), a7)
        elif VB == 4:
            a0 = tl.dot(scaled, code_of(low, 15, ASM), a0)
            a1 = tl.dot(scaled, code_of(low, 240, ASM), a1)
            a4 = tl.dot(scaled, code_of(high, 15, ASM), a4)
            a5 = tl.dot(scaled, code_of(high, 240, ASM), a5)
        else:
            a0 = tl.dot(scaled, code_of(low, 255, ASM), a0)
            a4 = tl.dot(scaled, code_of(high, 255, ASM), a4)
    return lowest, a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def _side_by_side(s0, s1, s2, s3, s4, s5, s6, s7, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    """Eight `[BLOCK_G, BLOCK_N]` tiles as one `[BLOCK_G, 8 BLOCK_N]`: column 8 n + f is column n of s_f."""
    even = tl.join(tl.join(s0, s4), tl.join(s2, s6))
    odd = tl.join(tl.join(s1, s5), tl.join(s3, s7))
    return tl.reshape(tl.join(even, odd), [BLOCK_G, 8 * BLOCK_N])


@triton.jit
def _tile(
    scaled_ptr, statistics_ptr, halves_ptr, words_ptr, floats_ptr, row, block, end, zone_start, zone_stop,
    rows, scales, minima, norm, j, highest, total, lowest, a0, a1, a2, a3, a4, a5, a6, a7,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    VB: tl.constexpr, ROW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over the zone's tokens of the full blocks from `block` up to `end`."""
    g, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    nb, r = n // 16, n % 16
    n2, n4 = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    n8, n16 = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    statistics = statistics_ptr + g * 8
    s0, s1, s2, s3, s4, s5, s6, s7 = _logits(
        scaled_ptr, halves_ptr, words_ptr, tl.multiple_of(tl.load(row + 9), 8), n2, n4, n8, n16,
        tl.load(statistics + 6)[:, None], block, block + nb < end, g, nb, r,
        BLOCK_D, BLOCK_G, BLOCK_N, BLOCK_C, ASM,
    )  # fmt: skip
    b0, b1 = tl.load(statistics)[:, None], tl.load(statistics + 1)[:, None]
    b2, b3 = tl.load(statistics + 2)[:, None], tl.load(statistics + 3)[:, None]
    undo, shift = tl.load(statistics + 4)[:, None], tl.load(statistics + 5)[:, None]
    if VB == 2:
        # likewise: what the logits were made of is let go of first
        tl.debug_barrier()
    logits = _side_by_side(
        s0 - b0, s1 - b1, s2 - b2, s3 - b3, s4 - b0, s5 - b1, s6 - b2, s7 - b3, BLOCK_G, BLOCK_N
    )  # fmt: skip
    i = tl.arange(0, 8 * BLOCK_N)
    # lane r of field f holds token 16 f + r of its block
    own_block = block + i // 128
    token = own_block * 128 + (i % 8) * 16 + (i // 8) % 16
    ok = (own_block < end) & (token >= zone_start) & (token < zone_stop)
    logits = tl.where(ok[None, :], logits * undo + shift, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(logits, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink = tl.exp2(highest - base)
    p = tl.exp2(logits - base[:, None])
    total = total * shrink + tl.sum(p, 1)
    lowest *= shrink
    # those that the width has no use for stay out of the loop, and of the registers
    a0 *= shrink[:, None]
    if VB < 16:
        a4 *= shrink[:, None]
    if VB < 8:
        a1, a5 = a1 * shrink[:, None], a5 * shrink[:, None]
    if VB < 4:
        a2, a3 = a2 * shrink[:, None], a3 * shrink[:, None]
        a6, a7 = a6 * shrink[:, None], a7 * shrink[:, None]
    lowest, a0, a1, a2, a3, a4, a5, a6, a7 = _add_values(
        p, token - zone_start, ok, halves_ptr, words_ptr, floats_ptr, rows, scales, minima, norm, j, lowest,
        a0, a1, a2, a3, a4, a5, a6, a7, VB, ROW, ASM,
    )  # fmt: skip
    return new_highest, total, lowest, a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def _store_part(partial_ptr, slot, value, g, channel, ok, G: tl.constexpr, D: tl.constexpr):
    mask = (g[:, None] < G) & ok[None, :] & (channel[None, :] < D)
    at = (slot * G + g[:, None]).to(tl.int64) * D + channel[None, :]
    tl.store(partial_ptr + at, value, mask=mask)


@triton.jit
def _packed_item(
    scaled_ptr, statistics_ptr, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
    slot, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, VB: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Full token blocks begin .. end of the entry at `row`, as far as their V has VB bits."""
    PER_WORD: tl.constexpr = 16 // VB
    ROW: tl.constexpr = D // PER_WORD
    BLOCK_W: tl.constexpr = BLOCK_D // PER_WORD
    BLOCK_TILES: tl.constexpr = BLOCK_N // 16
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
    norm = _power_of_two(exponent)
    g, j = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_W)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    lowest = tl.zeros([BLOCK_G], tl.float32)
    a0 = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    for block in range(begin, end, BLOCK_TILES):
        highest, total, lowest, a0, a1, a2, a3, a4, a5, a6, a7 = _tile(
            scaled_ptr, statistics_ptr, halves_ptr, words_ptr, floats_ptr, row, block, end, zone_start,
            zone_stop, rows, scales, minima, norm, j, highest, total, lowest, a0, a1, a2, a3, a4, a5, a6, a7,
            BLOCK_G, BLOCK_D, BLOCK_N, BLOCK_C, VB, ROW, ASM,
        )  # fmt: skip
    share = (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    inside = j < ROW
    if VB == 16:
        _store_part(partial_ptr, slot, a0 * share, g, j, inside, G, D)
    else:
        # a byte holds channels i, i + stride, ...; a word the bytes 2 j and 2 j + 1
        STRIDE: tl.constexpr = D * VB // 8
        unit = share * (1024.0 * _power_of_two(-exponent))
        low = lowest[:, None] * share
        _store_part(partial_ptr, slot, a0 * unit + low, g, 2 * j, inside, G, D)
        _store_part(partial_ptr, slot, a4 * unit + low, g, 2 * j + 1, inside, G, D)
        if VB < 8:
            unit_1 = unit / (1 << VB)
            _store_part(partial_ptr, slot, a1 * unit_1 + low, g, 2 * j + STRIDE, inside, G, D)
            _store_part(partial_ptr, slot, a5 * unit_1 + low, g, 2 * j + 1 + STRIDE, inside, G, D)
        if VB == 2:
            unit_2, unit_3 = unit / 16, unit / 64
            _store_part(partial_ptr, slot, a2 * unit_2 + low, g, 2 * j + 2 * STRIDE, inside, G, D)
            _store_part(partial_ptr, slot, a6 * unit_2 + low, g, 2 * j + 1 + 2 * STRIDE, inside, G, D)
            _store_part(partial_ptr, slot, a3 * unit_3 + low, g, 2 * j + 3 * STRIDE, inside, G, D)
            _store_part(partial_ptr, slot, a7 * unit_3 + low, g, 2 * j + 1 + 3 * STRIDE, inside, G, D)
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
        q = _queries_of(scaled_ptr, g, c, c < coded, BLOCK_D)
        of_codes = tl.dot(q, tl.where((c < coded)[:, None], half, 0.0), of_codes)
        q = _queries_of(scaled_ptr, g, c, (c >= coded) & (c < coded + n16), BLOCK_D)
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
    # which of a byte's fields holds channel d
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
    scale = tl.load(floats_ptr + tl.load(row + 13) + token, mask=ok & (token < coded), other=0.0)
    minimum = tl.load(floats_ptr + tl.load(row + 14) + token, mask=ok & (token < coded), other=0.0)
    rows = tl.load(row + 18) + (token - coded).to(tl.int64)[:, None] * D + d[None, :]
    whole = tl.load(halves_ptr + rows, mask=inside & ~is_code, other=0.0).to(tl.float32)
    return half.to(tl.float32) * scale[:, None] + minimum[:, None] + whole


@triton.jit
def _tail_item(
    scaled_ptr, statistics_ptr, halves_ptr, words_ptr, bytes_ptr, floats_ptr, row, partial_ptr, lse_ptr, slot,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The last, shorter block of the entry at `row`: at most 127 tokens of all widths, plainly."""
    num_tokens = (tl.load(row + 5) + tl.load(row + 6) + tl.load(row + 7) + tl.load(row + 8)).to(tl.int32)
    full = num_tokens // 128
    lanes = (num_tokens - full * 128 + 7) // 8
    g, r, d = tl.arange(0, BLOCK_G), tl.arange(0, 16), tl.arange(0, BLOCK_D)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for f in range(0, 8):
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
        # the tf32 of a float32 product would not do
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="tf32x3")
        highest = new_highest
    _store_part(partial_ptr, slot, acc / tl.where(total > 0, total, 1.0)[:, None], g, d, d < D, G, D)
    tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)


@triton.jit
def _rows_item(
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
    _store_part(partial_ptr, slot, acc / tl.where(total > 0, total, 1.0)[:, None], g, d, d < D, G, D)
    tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)


@triton.jit
def _trizone_kernel(
    query_ptr, key_ptr, value_ptr, heads_ptr, halves_ptr, words_ptr, bytes_ptr, floats_ptr, entries_ptr,
    items_ptr, scaled_ptr, statistics_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr, scale_log2, stride_row,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_SPLITS: tl.constexpr, FIELDS: tl.constexpr,
    ITEM: tl.constexpr, HEAD_FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    item = items_ptr + slot * ITEM
    kind, source = tl.load(item), tl.load(item + 1)
    begin, end, bh = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    row = entries_ptr + source.to(tl.int64) * FIELDS
    scaled = scaled_ptr + source.to(tl.int64) * BLOCK_G * BLOCK_D
    statistics = statistics_ptr + source.to(tl.int64) * BLOCK_G * 8
    if kind == 0:
        _packed_item(
            scaled, statistics, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
            slot, G, BLOCK_G, D, BLOCK_D, BLOCK_N, BLOCK_C, 2, ASM,
        )  # fmt: skip
    elif kind == 1:
        _packed_item(
            scaled, statistics, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
            slot, G, BLOCK_G, D, BLOCK_D, BLOCK_N, BLOCK_C, 4, ASM,
        )  # fmt: skip
    elif kind == 2:
        _packed_item(
            scaled, statistics, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
            slot, G, BLOCK_G, D, BLOCK_D, BLOCK_N, BLOCK_C, 8, ASM,
        )  # fmt: skip
    elif kind == 3:
        _packed_item(
            scaled, statistics, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
            slot, G, BLOCK_G, D, BLOCK_D, BLOCK_N, BLOCK_C, 16, ASM,
        )  # fmt: skip
    elif kind == 4:
        _rows_item(
            query_ptr, key_ptr, value_ptr, heads_ptr, bh, begin, end, stride_row, scale_log2, partial_ptr,
            lse_ptr, slot, G, BLOCK_G, D, BLOCK_D, BLOCK_R, HEAD_FIELDS, ALIGN, DOT,
        )  # fmt: skip
    elif kind == 5:
        _tail_item(
            scaled, statistics, halves_ptr, words_ptr, bytes_ptr, floats_ptr, row, partial_ptr, lse_ptr, slot,
            G, BLOCK_G, D, BLOCK_D, BLOCK_C,
        )  # fmt: skip
    if kind <= 5:
        combine_if_last(
            partial_ptr, lse_ptr, counter_ptr, out_ptr, bh, tl.load(item + 5), tl.load(item + 6),
            tl.arange(0, BLOCK_D), G, D, BLOCK_SPLITS,
        )  # fmt: skip


def trizone_decode_batch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: Tensor,
    codes: Tensor,
    work: WorkList,
    *,
    row_stride: int,
    scaling: float,
    scaled: Tensor,
    statistics: Tensor,
    workspace: SplitWorkspace,
    output: Tensor,
) -> None:
    """One decode step of a batch over its packed prompts and new rows: a prologue and one launch.

    Args:
        queries: contiguous `[B, H_kv, G, D]`.
        keys, values: the buffers that `heads` counts from (the arena, or two), the queries' dtype.
        heads: int64 `[B * H_kv, F]`, the new rows; see `kernels/descriptors.py`.
        codes: uint8, what the work list's offsets count from; at a multiple of 16 bytes.
        scaled, statistics: scratch, float16 `[entries, 16, D to a power of two]` and float32
            `[entries, 16, STATISTICS]`.
        workspace: of at least as many slots as the list has items.
        output: out, contiguous `[B, H_kv, G, D]` in the queries' dtype.
    """
    group_size, head_dim = queries.shape[2:]
    block_d = max(triton.next_power_of_2(head_dim), 16)
    usable = codes[: codes.numel() // 4 * 4]
    halves, words, floats = (usable.view(dtype) for dtype in (torch.float16, torch.int16, torch.float32))
    scale_log2 = scaling * LOG2_E
    shape = {
        "G": group_size,
        "BLOCK_G": MIN_BLOCK_G,
        "D": head_dim,
        "BLOCK_D": block_d,
        "FIELDS": ENTRY_FIELDS,
    }
    _prologue_kernel[(work.entries.shape[0],)](
        queries,
        words,
        floats,
        work.entries,
        scaled,
        statistics,
        scale_log2,
        **shape,
        num_warps=4,
        num_stages=1,
    )
    _trizone_kernel[(work.items.shape[0],)](
        queries, keys, values, heads, halves, words, codes, floats, work.entries, work.items, scaled,
        statistics, workspace.partial, workspace.lse, workspace.counters, output, scale_log2, row_stride,
        **shape,
        BLOCK_N=64 if interpreting() else 16, BLOCK_C=BLOCK_CHANNELS,
        BLOCK_R=block_tokens(queries.dtype, block_d),
        BLOCK_SPLITS=triton.next_power_of_2(work.max_items_per_head), ITEM=ITEM_FIELDS,
        HEAD_FIELDS=heads.shape[1], ALIGN=ALIGNMENT_BYTES // queries.element_size(),
        DOT=dot_dtype(queries.dtype), ASM=not interpreting(), num_warps=8, num_stages=2,
    )  # fmt: skip


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
    item_bytes: int | None = None,
    row_splits: int = 1,
) -> Tensor:
    """One sequence of `trizone_decode_batch`; arguments are checked by the dispatch in `__init__.py`."""
    num_kv_heads, group_size, head_dim = queries.shape
    device = queries.device
    # layers without a byte still need somewhere to point
    codes = next((s.buffer for s in segments if s.buffer.numel()), queries.new_zeros(16, dtype=torch.uint8))
    if item_bytes is None:
        item_bytes = balanced_item_bytes([segments], num_kv_heads * choose_num_splits(num_kv_heads, device))
    work = work_list([segments], codes, row_splits=row_splits, item_bytes=item_bytes)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    num_entries, num_items = work.entries.shape[0], work.items.shape[0]
    trizone_decode_batch(
        queries.contiguous()[None],
        new_keys,
        new_values,
        uniform_heads(
            key_stride=new_keys.stride(0),
            value_stride=new_values.stride(0),
            lengths=[new_keys.shape[1]] * num_kv_heads,
            device=device,
        ),
        codes,
        work,
        row_stride=new_keys.stride(1),
        scaling=scaling,
        scaled=torch.empty(num_entries, MIN_BLOCK_G, block_d, dtype=torch.float16, device=device),
        statistics=torch.empty(num_entries, MIN_BLOCK_G, STATISTICS, dtype=torch.float32, device=device),
        workspace=split_workspace(
            num_heads=num_kv_heads,
            num_slots=num_items,
            group_size=group_size,
            head_dim=head_dim,
            device=device,
        ),
        output=output[None],
    )
    return output
