"""HSA's second and third launch in Triton: choose k2 tokens by their pages' scores, attend to them exactly.

    _select_tokens_kernel  (head): softmax over tokens, mean over the group, top-k2 without a sort
    _gather_attend_kernel  (head, split): rows gathered by token, combined by the last split

Imported only by `triton_kernel.py`, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.split_attention import (
    attend_tile,
    finish_split,
    first_state,
    load_queries,
    split_range,
)


@triton.jit
def _page_keys(
    score_ptr, partial_ptr, bh, p, num_pages, block_pages, max_pages, num_blocks,
    G: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Return each page's share of one token, mean over the group, as an integer of the same order; -1 beyond.

    A score that is not finite counts as 0: its bits do not have that order.
    """
    b = tl.arange(0, BLOCK_B)
    used = b < tl.cdiv(num_pages, block_pages)
    score = tl.zeros_like(p).to(tl.float32)
    for head in range(0, G):
        part = partial_ptr + ((bh * num_blocks + b) * G + head) * 2
        highest = tl.load(part, mask=used, other=float("-inf"))
        total = tl.load(part + 1, mask=used, other=0.0)
        top = tl.max(highest, 0)
        denominator = tl.sum(total * tl.exp2(highest - top), 0)
        row = score_ptr + (bh * G + head).to(tl.int64) * max_pages + p
        logits = tl.load(row, mask=p < num_pages, other=float("-inf"))
        score += tl.exp2(logits - top) / denominator
    score = tl.where((score > 0) & (score < float("inf")), score / G, 0.0)
    return tl.where(p < num_pages, score.to(tl.int32, bitcast=True), -1)


@triton.jit
def _select_tokens_kernel(
    score_ptr, partial_ptr, heads_ptr, token_ptr, count_ptr, max_pages, num_blocks, block_pages, max_tokens,
    G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_B: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0)
    entry = heads_ptr + bh * FIELDS
    length = tl.load(entry + 2).to(tl.int32)
    page_size = tl.load(entry + 6).to(tl.int32)
    wanted = tl.minimum(tl.load(entry + 8).to(tl.int32), length) - 1
    num_pages = tl.cdiv(length, page_size)
    p = tl.arange(0, BLOCK_P)
    tokens = token_ptr + bh.to(tl.int64) * max_tokens
    if length > 0:
        # the newest token is always selected; the others compete for the rest, page by page
        size = tl.where(p < num_pages, tl.minimum(length - 1 - p * page_size, page_size), 0)
        key = _page_keys(
            score_ptr, partial_ptr, bh, p, num_pages, block_pages, max_pages, num_blocks, G, BLOCK_B
        )  # fmt: skip
        # scores are at most 1.0 (a little more with rounding), whose float32 pattern has 30 bits;
        # the largest bound that still lets `wanted` tokens pass, two bits a step; the three candidates'
        # tokens, fewer than 2^21 of a head, are counted in one sum
        bound = tl.zeros([1], tl.int32)
        for step in tl.static_range(15):
            passing = tl.zeros_like(p).to(tl.int64)
            for candidate in tl.static_range(1, 4):
                passes = key >= bound + (candidate << (28 - 2 * step))
                passing += tl.where(passes, size, 0).to(tl.int64) << (21 * (candidate - 1))
            counts = tl.sum(passing, 0)
            digit = tl.zeros([1], tl.int32)
            for candidate in tl.static_range(1, 4):
                count = (counts >> (21 * (candidate - 1))) & 0x1FFFFF
                digit += (count >= wanted).to(tl.int32)
            bound += digit << (28 - 2 * step)
        above = tl.where(key > bound, size, 0)
        equal = tl.where(key == bound, size, 0)
        left = wanted - tl.sum(above, 0)
        before = tl.cumsum(equal, 0) - equal
        take = above + tl.minimum(equal, tl.maximum(left - before, 0))
        place = tl.cumsum(take, 0) - take
        # `take` adds up to `wanted`; this keeps the stores in bounds whatever the scores were
        take = tl.minimum(take, wanted - place)
        for j in range(0, page_size):
            tl.store(tokens + place + j, p * page_size + j, mask=j < take)
        tl.store(tokens + wanted, length - 1)
    tl.store(count_ptr + bh, wanted + 1)


@triton.jit
def _gather_attend_kernel(
    query_ptr, arena_ptr, heads_ptr, token_ptr, count_ptr, sink_ptr, partial_ptr, lse_ptr, counter_ptr,
    out_ptr, scale_log2, cap_log2, max_tokens, num_kv_heads,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    bh, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    key_offset = tl.multiple_of(tl.load(heads_ptr + bh * FIELDS), ALIGN)
    value_offset = tl.multiple_of(tl.load(heads_ptr + bh * FIELDS + 1), ALIGN)
    last = tl.load(heads_ptr + bh * FIELDS + 2).to(tl.int32) - 1
    count = tl.load(count_ptr + bh)
    begin, end, active = split_range(tl.cdiv(count, BLOCK_N), split, num_splits, MIN_TILES)
    if split < active:
        g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        q = load_queries(query_ptr, bh, g, d, G, D, DOT)
        highest, total = first_state(sink_ptr, bh % num_kv_heads, split == 0, g, G, BLOCK_G, SINKS)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for tile in range(begin, end):
            i = tile * BLOCK_N + n
            ok = i < count
            token = tl.load(token_ptr + bh.to(tl.int64) * max_tokens + i, mask=ok, other=0)
            # whatever was selected, only this head's rows are read
            token = tl.minimum(tl.maximum(token, 0), last)
            at = token.to(tl.int64)[:, None] * D + d[None, :]
            mask = ok[:, None] & (d[None, :] < D)
            k = tl.load(arena_ptr + key_offset + at, mask=mask, other=0.0).to(DOT)
            v = tl.load(arena_ptr + value_offset + at, mask=mask, other=0.0).to(DOT)
            highest, total, acc = attend_tile(q, k, v, ok, highest, total, acc, scale_log2, cap_log2, CAPPED)
        finish_split(
            acc, highest, total, partial_ptr, lse_ptr, counter_ptr, out_ptr, bh,
            bh * num_splits + split, bh * num_splits, active, g, d, G, D,
        )  # fmt: skip
