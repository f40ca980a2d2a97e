"""The items of TriZone's work list, each one program's share of a head.

packed_item  the tokens of one V width in some halves of token blocks
rows_item    a split of a head's unpacked rows (zone C)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.split_attention import attend_tile, load_queries, log_sum, split_range, store_part
from kvferry.kernels.trizone.codes import keys_of, unpacked


@triton.jit
def _lane_words(words_ptr, bit, before, lanes, lane, ok, FULL: tl.constexpr):
    """Load the int16 words that have a field, whose first bit is `bit`, of each channel: `[BLOCK_C, 16]`."""
    word = before + (bit >> 4)
    if FULL:
        words = tl.load(words_ptr + word * 16 + lane, mask=ok, other=0)
    else:
        words = tl.load(words_ptr + word * lanes + lane, mask=ok, other=0)
    return words


@triton.jit
def _tile_keys(
    words_ptr, scale_ptr, minimum_ptr, c, lanes, field, n2, n4, n8, n16, FULL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Return K of some channels c `[BLOCK_C]` of a tile of the block at `words_ptr`: float16 `[BLOCK_C, 64]`.

    Column 16 f + r is the token at lane r, field `field` + f; the block has `lanes` lanes, which is the
    constant 16 if FULL, so that eight lanes are one load.

    Args: scale_ptr, minimum_ptr: of the tile's group.
    """
    coded = n2 + n4 + n8
    # cheap loads: there are fewer channels than threads
    scale = tl.load(scale_ptr + c, mask=c < coded, other=1.0)[:, None]
    minimum = tl.load(minimum_ptr + c, mask=c < coded, other=0.0)[:, None]
    lane = tl.arange(0, 16)[None, :]
    # what is equal in a row is computed for each number of it, which the compiler does once
    c = c[:, None] + 0 * lane
    scale, minimum = tl.broadcast_to(scale, c.shape), tl.broadcast_to(minimum, c.shape)
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
    b0, b1 = field << log_width, (field + 1) << log_width
    b2, b3 = (field + 2) << log_width, (field + 3) << log_width
    ok = there if FULL else there & (lane < lanes)
    w0 = _lane_words(words_ptr, b0, before, lanes, lane, ok, FULL)
    w1 = _lane_words(words_ptr, b1, before, lanes, lane, ok, FULL)
    w2 = _lane_words(words_ptr, b2, before, lanes, lane, ok, FULL)
    w3 = _lane_words(words_ptr, b3, before, lanes, lane, ok, FULL)
    # a code becomes 1024 + code; a channel of 16 bits stays as it is
    mask = ((1 << (1 << log_width)) - 1) * 0x10001
    one = tl.where(c < coded, 0x64006400, 0)
    base = tl.where(c < coded, 1024.0, 0.0).to(tl.float16)
    k0 = keys_of(w0, b0 & 15, mask, one, base, scale, minimum, ASM)
    k1 = keys_of(w1, b1 & 15, mask, one, base, scale, minimum, ASM)
    k2 = keys_of(w2, b2 & 15, mask, one, base, scale, minimum, ASM)
    k3 = keys_of(w3, b3 & 15, mask, one, base, scale, minimum, ASM)
    fields = tl.join(tl.join(k0, k2), tl.join(k1, k3))  # [channel, lane, f // 2, f % 2]
    return tl.reshape(tl.permute(fields, 0, 2, 3, 1), [c.shape[0], 64])


@triton.jit
def _value_words(words_ptr, token, ok, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Load the int16 words of V of one tile's tokens: `[64, BLOCK_D * WIDTH / 16]`.

    Args: token `[64]`, each one's place in the zone at `words_ptr`.
    """
    j = tl.arange(0, BLOCK_D * WIDTH // 16)
    row = token[:, None] * (D * WIDTH // 16) + j[None, :]
    return tl.load(words_ptr + row, mask=ok[:, None] & (j < D * WIDTH // 16)[None, :], other=0)


@triton.jit
def _add_value_products(
    acc, p, words, scale, minimum, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Add `sum_t v_t p_t` of one tile's tokens to acc, all words' first codes first.

    Args: acc `[BLOCK_D, BLOCK_Q]`; p float16 `[64, BLOCK_Q]`; scale, minimum: float16 `[64]`.
    """
    v = unpacked(
        words, tl.broadcast_to(scale[:, None], words.shape), tl.broadcast_to(minimum[:, None], words.shape),
        WIDTH, ASM,
    )  # fmt: skip
    return tl.dot(tl.trans(tl.reshape(tl.trans(v, 0, 2, 1), [64, BLOCK_D])), p, acc)


@triton.jit
def packed_item(
    scaled_ptr, undo_ptr, halves_ptr, words_ptr, row, kind, begin, end, partial_ptr, lse_ptr, slot,
    G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_Q: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens with 2^(kind + 1) bits of V in tiles begin .. end of the entry at `row`.

    A tile is half a token block: four of its eight fields, which are in one group of K's scales. Products are
    transposed, because a group of queries is shorter than the least number of a product's rows.
    """
    n2, n4 = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    n8, n16 = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    t2, t4 = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    t8, t16 = tl.load(row + 7).to(tl.int32), tl.load(row + 8).to(tl.int32)
    num_tokens = t2 + t4 + t8 + t16
    zone_start = tl.where(kind > 0, t2, 0) + tl.where(kind > 1, t4, 0) + tl.where(kind > 2, t8, 0)
    zone_stop = zone_start + tl.load(row + 5 + kind).to(tl.int32)
    key_words = words_ptr + tl.multiple_of(tl.load(row + 9), 8)
    value_words = words_ptr + tl.multiple_of(tl.load(row + 15 + kind), 8)
    key_scale_ptr, key_minimum_ptr = halves_ptr + tl.load(row + 11), halves_ptr + tl.load(row + 12)
    scale_ptr = halves_ptr + tl.load(row + 13) + zone_start
    minimum_ptr = halves_ptr + tl.load(row + 14) + zone_start
    full = num_tokens // 128
    last_lanes = (num_tokens - full * 128 + 7) // 8
    g, d, t = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D), tl.arange(0, 64)
    undo = tl.load(undo_ptr + g)[None, :]
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    # column sums, which are added up at the end, because sums across warps wait for one another
    totals = tl.zeros([64, BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
    for tile in range(begin, end):
        block, field = tile // 2, tile % 2 * 4
        block_words = key_words + block * (16 * (n2 + 2 * n4 + 4 * n8 + 8 * n16))
        lanes = tl.where(block < full, 16, last_lanes)
        # a last block of at most 64 tokens is one group
        headers = tl.minimum(tile, tl.cdiv(num_tokens, 64) - 1) * (n2 + n4 + n8)
        token = block * 128 + (field + t // 16) * lanes + t % 16
        ok = (t % 16 < lanes) & (token >= zone_start) & (token < zone_stop)
        token -= zone_start
        # V of the most usual width is asked for early; loads of scales are cheap: there are more threads
        words = _value_words(value_words, token, ok & (kind == 0), D, BLOCK_D, 2)
        scale = tl.load(scale_ptr + token, mask=ok & (kind < 3), other=0.0)
        minimum = tl.load(minimum_ptr + token, mask=ok & (kind < 3), other=0.0)
        logits = tl.zeros([64, BLOCK_Q], tl.float32)
        for first in range(0, n2 + n4 + n8 + n16, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            q = tl.load(scaled_ptr + g[None, :] * BLOCK_D + c[:, None])
            if block < full:
                k = _tile_keys(
                    block_words, key_scale_ptr + headers, key_minimum_ptr + headers, c, 16, field, n2, n4,
                    n8, n16, True, ASM,
                )  # fmt: skip
                logits = tl.dot(tl.trans(k), q, logits)
            else:
                k = _tile_keys(
                    block_words, key_scale_ptr + headers, key_minimum_ptr + headers, c, last_lanes, field,
                    n2, n4, n8, n16, False, ASM,
                )  # fmt: skip
                logits = tl.dot(tl.trans(k), q, logits)
        logits = tl.where(ok[:, None], logits * undo, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp2(highest - base)
        p = tl.exp2(logits - base[None, :])
        highest = new_highest
        totals = totals * shrink[None, :] + p
        acc *= shrink[None, :]
        half = p.to(tl.float16)
        if kind == 0:
            acc = _add_value_products(acc, half, words, scale, minimum, BLOCK_D, 2, ASM)
        for wider in tl.static_range(1, 4):
            if kind == wider:
                acc = _add_value_products(
                    acc, half, _value_words(value_words, token, ok, D, BLOCK_D, 2 << wider), scale, minimum,
                    BLOCK_D, 2 << wider, ASM,
                )  # fmt: skip
    total = tl.sum(totals, 0)
    # all words' first codes, then their second ones; a byte has channels i, i + stride, ..., a word the
    # bytes 2 j and 2 j + 1
    num_words = BLOCK_D >> (3 - kind)
    field, j = d // num_words, d % num_words
    of_byte = tl.maximum(4 >> kind, 1)
    channel = tl.where(kind < 3, 2 * j + field // of_byte + field % of_byte * (D * (2 << kind) // 8), d)
    mask = (g[None, :] < G) & ((j < (D >> (3 - kind))) & (channel < D))[:, None]
    value = acc / tl.where(total > 0, total, 1.0)[None, :]
    tl.store(partial_ptr + (slot * G + g[None, :]).to(tl.int64) * D + channel[:, None], value, mask=mask)
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
