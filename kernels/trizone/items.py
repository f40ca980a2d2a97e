"""The items of TriZone's work list, each one program's share of a head.

packed_item  the tokens of one V width in some halves of token blocks
rows_item    a split of a head's unpacked rows (zone C)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.split_attention import attend_tile, load_queries, log_sum, split_range, store_part
from kvferry.kernels.trizone.codes import unpacked
from kvferry.kernels.trizone.scaled_queries import power_of_two


@triton.jit
def _key_logits(
    scaled_ptr, words_ptr, pairs_ptr, scale_ptr, minimum_ptr, start, lanes, field, n2, n4, n8, n16, g,
    BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Compute `(q~ s) code + q~ min` of a tile of the block whose words begin at `start`: `[BLOCK_G, 64]`.

    Column 16 f + r is the token at lane r, field `field` + f; the block has `lanes` lanes, 16 if FULL. One
    loop handles the channels of all widths, because each loop begins with a wait for memory.

    Args: words_ptr, pairs_ptr: the head's words as int16, and two at a time as int32; scale_ptr, minimum_ptr:
        of the tile's group.
    """
    coded = n2 + n4 + n8
    logits = tl.zeros([g.shape[0], 64], tl.float32)
    lowest = tl.zeros([g.shape[0], BLOCK_C], tl.float32)
    for first in range(0, coded + n16, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        q = tl.load(scaled_ptr + g[:, None] * BLOCK_D + c[None, :])
        scale = tl.load(scale_ptr + c, mask=c < coded, other=1.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + c, mask=c < coded, other=0.0).to(tl.float32)
        lowest += q * minimum[None, :]
        # the width is 2^log_width; the words of a lane that earlier channels take
        log_width = tl.where(c < n2, 1, tl.where(c < n2 + n4, 2, tl.where(c < coded, 3, 4)))
        before = tl.where(
            c < n2, c,
            tl.where(
                c < n2 + n4, 2 * c - n2,
                tl.where(c < coded, 4 * c - 3 * n2 - 2 * n4, 8 * c - 7 * n2 - 6 * n4 - 4 * n8),
            ),
        )  # fmt: skip
        there = c < coded + n16
        # a code becomes 1024 + code; a channel of 16 bits stays as it is
        code_mask = (1 << (1 << log_width)) - 1
        one = tl.where(c < coded, 0x6400, 0)
        if FULL:
            # two lanes at a time
            i = tl.arange(0, 32)
            bit = (field + i // 8)[None, :] << log_width[:, None]
            at = start // 2 + before[:, None] * 8 + (bit >> 4) * 8 + (i % 8)[None, :]
            pairs = tl.load(pairs_ptr + at, mask=there[:, None], other=0)
            pairs = ((pairs >> (bit & 15)) & (code_mask * 0x10001)[:, None]) | (one * 0x10001)[:, None]
            words = tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), [BLOCK_C, 64])
        else:
            t = tl.arange(0, 64)
            bit = (field + t // 16)[None, :] << log_width[:, None]
            at = start + (before[:, None] + (bit >> 4)) * lanes + (t % 16)[None, :]
            words = tl.load(words_ptr + at, mask=there[:, None] & (t % 16 < lanes)[None, :], other=0)
            words = (((words.to(tl.int32) >> (bit & 15)) & code_mask[:, None]) | one[:, None]).to(tl.int16)
        k = words.to(tl.float16, bitcast=True) - tl.where(c < coded, 1024.0, 0.0).to(tl.float16)[:, None]
        logits = tl.dot((q * scale[None, :]).to(tl.float16), k, logits)
    return logits + tl.sum(lowest, 1)[:, None]


@triton.jit
def _add_value_products(
    acc, lowest, p, token, ok, words_ptr, scale_ptr, minimum_ptr, norm,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add `sum_t p_t v_t` of one tile's tokens: codes to acc, all words' first ones first, minima to
    `lowest`.

    Args: lowest, p `[BLOCK_G, 64]`; token `[64]`, each one's place in the zone to whose V the pointers point.
    """
    j = tl.arange(0, BLOCK_D * WIDTH // 16)
    row = token[:, None] * (D * WIDTH // 16) + j[None, :]
    words = tl.load(words_ptr + row, mask=ok[:, None] & (j < D * WIDTH // 16)[None, :], other=0)
    if WIDTH < 16:
        scale = tl.load(scale_ptr + token, mask=ok, other=0.0).to(tl.float32) * norm
        minimum = tl.load(minimum_ptr + token, mask=ok, other=0.0).to(tl.float32)
        lowest += p * minimum[None, :]
        p *= scale[None, :]
    v = tl.reshape(tl.trans(unpacked(words, WIDTH, ASM), 0, 2, 1), [64, BLOCK_D])
    return tl.dot(p.to(tl.float16), v, acc), lowest


@triton.jit
def packed_item(
    scaled_ptr, undo_ptr, halves_ptr, words_ptr, pairs_ptr, row, kind, begin, end, partial_ptr, lse_ptr,
    slot, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens with 2^(kind + 1) bits of V in tiles begin .. end of the entry at `row`.

    A tile is half a token block: four of its eight fields, which are in one group of K's scales.
    """
    n2, n4 = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    n8, n16 = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    t2, t4 = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    t8, t16 = tl.load(row + 7).to(tl.int32), tl.load(row + 8).to(tl.int32)
    num_tokens = t2 + t4 + t8 + t16
    zone_start = tl.where(kind > 0, t2, 0) + tl.where(kind > 1, t4, 0) + tl.where(kind > 2, t8, 0)
    zone_stop = zone_start + tl.load(row + 5 + kind).to(tl.int32)
    key_words = words_ptr + tl.multiple_of(tl.load(row + 9), 8)
    key_pairs = pairs_ptr + tl.multiple_of(tl.load(row + 9) // 2, 4)
    value_words = words_ptr + tl.multiple_of(tl.load(row + 15 + kind), 8)
    key_scale_ptr, key_minimum_ptr = halves_ptr + tl.load(row + 11), halves_ptr + tl.load(row + 12)
    scale_ptr = halves_ptr + tl.load(row + 13) + zone_start
    minimum_ptr = halves_ptr + tl.load(row + 14) + zone_start
    exponent = tl.load(row + 21).to(tl.int32)
    norm = power_of_two(exponent)
    full = num_tokens // 128
    last_lanes = (num_tokens - full * 128 + 7) // 8
    g, t = tl.arange(0, BLOCK_G), tl.arange(0, 64)
    undo = tl.load(undo_ptr + g)[:, None]
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    # column sums, which are added up at the end, because sums across warps wait for one another
    totals = tl.zeros([BLOCK_G, 64], tl.float32)
    lowest = tl.zeros([BLOCK_G, 64], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in range(begin, end):
        block, field = tile // 2, tile % 2 * 4
        start = block * (16 * (n2 + 2 * n4 + 4 * n8 + 8 * n16))
        # a last block of at most 64 tokens is one group
        headers = tl.minimum(tile, tl.cdiv(num_tokens, 64) - 1) * (n2 + n4 + n8)
        if block < full:
            logits = _key_logits(
                scaled_ptr, key_words, key_pairs, key_scale_ptr + headers, key_minimum_ptr + headers, start,
                16, field, n2, n4, n8, n16, g, BLOCK_D, BLOCK_C, True,
            )  # fmt: skip
        else:
            logits = _key_logits(
                scaled_ptr, key_words, key_pairs, key_scale_ptr + headers, key_minimum_ptr + headers, start,
                last_lanes, field, n2, n4, n8, n16, g, BLOCK_D, BLOCK_C, False,
            )  # fmt: skip
        lanes = tl.where(block < full, 16, last_lanes)
        token = block * 128 + (field + t // 16) * lanes + t % 16
        ok = (t % 16 < lanes) & (token >= zone_start) & (token < zone_stop)
        logits = tl.where(ok[None, :], logits * undo, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp2(highest - base)
        p = tl.exp2(logits - base[:, None])
        highest = new_highest
        totals = totals * shrink[:, None] + p
        lowest *= shrink[:, None]
        acc *= shrink[:, None]
        token -= zone_start
        if kind == 0:
            acc, lowest = _add_value_products(
                acc, lowest, p, token, ok, value_words, scale_ptr, minimum_ptr, norm, D, BLOCK_D, 2, ASM
            )
        elif kind == 1:
            acc, lowest = _add_value_products(
                acc, lowest, p, token, ok, value_words, scale_ptr, minimum_ptr, norm, D, BLOCK_D, 4, ASM
            )
        elif kind == 2:
            acc, lowest = _add_value_products(
                acc, lowest, p, token, ok, value_words, scale_ptr, minimum_ptr, norm, D, BLOCK_D, 8, ASM
            )
        else:
            acc, lowest = _add_value_products(
                acc, lowest, p, token, ok, value_words, scale_ptr, minimum_ptr, norm, D, BLOCK_D, 16, ASM
            )
    total = tl.sum(totals, 1)
    share = 1.0 / tl.where(total > 0, total, 1.0)
    unit = tl.where(kind < 3, share * power_of_two(-exponent), share)
    # all words' first codes, then their second ones; a byte has channels i, i + stride, ..., a word the
    # bytes 2 j and 2 j + 1
    d = tl.arange(0, BLOCK_D)
    num_words = BLOCK_D >> (3 - kind)
    field, j = d // num_words, d % num_words
    of_byte = tl.maximum(4 >> kind, 1)
    channel = tl.where(kind < 3, 2 * j + field // of_byte + field % of_byte * (D * (2 << kind) // 8), d)
    value = acc * unit[:, None] + (tl.sum(lowest, 1) * share)[:, None]
    store_part(partial_ptr, slot, value, g, channel, j < (D >> (3 - kind)), G, D)
    tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)


@triton.jit
def rows_item(
    query_ptr, key_ptr, value_ptr, heads_ptr, bh, split, num_splits, stride_row, scale_log2, partial_ptr,
    lse_ptr, slot, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, HEAD_FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a head's unpacked rows (zone C)."""
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
