"""The other item of TriZone's packed zones: a head's last, shorter token block, with all widths."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.split_attention import log_sum, store_part
from kvferry.kernels.trizone.scaled_queries import queries_of


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
    scale = tl.load(floats_ptr + tl.load(row + 13) + token, mask=ok & (token < coded), other=0.0)
    minimum = tl.load(floats_ptr + tl.load(row + 14) + token, mask=ok & (token < coded), other=0.0)
    rows = tl.load(row + 18) + (token - coded).to(tl.int64)[:, None] * D + d[None, :]
    whole = tl.load(halves_ptr + rows, mask=inside & ~is_code, other=0.0).to(tl.float32)
    return half.to(tl.float32) * scale[:, None] + minimum[:, None] + whole


@triton.jit
def tail_item(
    scaled_ptr, statistics_ptr, halves_ptr, words_ptr, bytes_ptr, floats_ptr, row, partial_ptr, lse_ptr, slot,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The last, shorter block of the entry at `row`: at most 127 tokens of all widths."""
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
        # plain tf32 is not exact enough
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="tf32x3")
        highest = new_highest
    store_part(partial_ptr, slot, acc / tl.where(total > 0, total, 1.0)[:, None], g, d, d < D, G, D)
    tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)
