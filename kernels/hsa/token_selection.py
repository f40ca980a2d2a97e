"""HSA's second and third launch in Triton: choose k2 tokens by their pages' scores, attend to them exactly.

    _select_tokens_kernel  (head): softmax over tokens, mean over the group, top-k2 without a sort
    _gather_attend_kernel  (head, split): rows gathered by token, combined by the last split

Imported only by `triton_kernel.py`, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.dependent_launch import begin_after_others
from kvferry.kernels.split_attention import attend_tile, finish_split, first_state, load_queries, split_range

_KEY_BITS = tl.constexpr(30)
"""Scores are at most 1.0, or a little more with rounding: the bits of such a float32."""
_STEP_BITS = tl.constexpr(3)
"""Bits of a bound that one pass over the pages finds; `_KEY_BITS` is a multiple."""
_PAIRS = tl.constexpr(4)
"""Half of their values, 2^`_STEP_BITS`."""


@triton.jit
def _page_keys(
    score_ptr, partial_ptr, bh, p, num_pages, block_pages, max_pages, num_blocks,
    G: tl.constexpr, HEADS: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Return each page's share of one token, mean over the group, as an integer of the same order; -1 beyond.

    A score that is not finite counts as 0: its bits do not have that order.
    """
    b = tl.arange(0, BLOCK_B)
    score = tl.zeros_like(p).to(tl.float32)
    for first in tl.static_range(0, G, HEADS):
        head = first + tl.arange(0, HEADS)
        used = (head < G)[:, None] & (b < tl.cdiv(num_pages, block_pages))[None, :]
        part = partial_ptr + ((bh * num_blocks + b[None, :]) * G + head[:, None]) * 2
        highest = tl.load(part, mask=used, other=float("-inf"))
        total = tl.load(part + 1, mask=used, other=0.0)
        row = score_ptr + (bh * G + head[:, None]).to(tl.int64) * max_pages + p[None, :]
        there = (head < G)[:, None] & (p < num_pages)[None, :]
        logits = tl.load(row, mask=there, other=float("-inf"))
        top = tl.where(head < G, tl.max(highest, 1), 0.0)
        denominator = tl.sum(total * tl.exp2(highest - top[:, None]), 1)
        share = 1.0 / tl.where(head < G, denominator * G, 1.0)
        score += tl.sum(tl.exp2(logits - top[:, None]) * share[:, None], 0)
    score = tl.where((score > 0) & (score < float("inf")), score, 0.0)
    return tl.where(p < num_pages, score.to(tl.int32, bitcast=True), -1)


@triton.jit
def _narrow(key, last_key, num_whole, need, need_beside_last):
    """Find bounds of keys: pages from the lower one up have the tokens wanted, those from the upper one up
    have not, and one page at most is between, or pages of one key.

    Args:
        key: of the whole pages, all but the last; -1 for no page.
        need: the least of them that have the tokens wanted, without the last page; need_beside_last: and with
            the last page.

    Returns: both bounds, and how many whole pages each has from there up.
    """
    low = tl.zeros_like(last_key)
    above = tl.zeros_like(last_key)
    passing = num_whole
    shift = tl.zeros_like(last_key) + _KEY_BITS
    between = passing + 1
    # the candidates of a step in pairs, because one word counts the pages of two: a head has fewer than 2^15
    pair = tl.arange(0, _PAIRS)
    while (shift > 0) & (between > 1):
        shift -= _STEP_BITS
        even = low + ((2 * pair) << shift)
        odd = even + (1 << shift)
        counts = tl.sum(
            tl.where(key[None, :] >= even[:, None], 1, 0)
            + tl.where(key[None, :] >= odd[:, None], 1 << 16, 0),
            1,
        )
        of_even, of_odd = counts & 0xFFFF, counts >> 16
        even_passes = of_even >= tl.where(last_key >= even, need_beside_last, need)
        odd_passes = of_odd >= tl.where(last_key >= odd, need_beside_last, need)
        # the first candidate is the bound so far, which passes; none passes after one that does not
        digit = tl.sum(tl.where(even_passes, 1, 0) + tl.where(odd_passes, 1, 0), 0) - 1
        failed = tl.maximum(tl.where(even_passes, 0, of_even), tl.where(odd_passes, 0, of_odd))
        passed = tl.minimum(
            tl.where(even_passes, of_even, num_whole), tl.where(odd_passes, of_odd, num_whole)
        )
        above = tl.maximum(above, tl.max(failed, 0))
        passing = tl.min(passed, 0)
        low += digit << shift
        inside = (last_key >= low) & (last_key < low + (1 << shift))
        between = passing - above + tl.where(inside, 1, 0)
    return low, low + (1 << shift), passing, above


@triton.jit
def _select_tokens_kernel(
    score_ptr, partial_ptr, heads_ptr, token_ptr, count_ptr, max_pages, num_blocks, block_pages, max_tokens,
    G: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr,
    FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
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
        last_page = num_pages - 1
        in_last = length - 1 - last_page * page_size
        key = _page_keys(
            score_ptr, partial_ptr, bh, p, num_pages, block_pages, max_pages, num_blocks, G, HEADS, BLOCK_B
        )  # fmt: skip
        last_key = tl.max(tl.where(p == last_page, key, -1), 0)
        key = tl.where(p < last_page, key, -1)
        low, high, passing, above = _narrow(
            key, last_key, last_page, tl.cdiv(wanted, page_size), tl.cdiv(wanted - in_last, page_size)
        )
        # pages between the bounds share what is left, in order: some are taken whole, the next in part
        last_above = last_key >= high
        left = wanted - above * page_size - tl.where(last_above, in_last, 0)
        whole = tl.minimum(left // page_size, passing - above)
        left -= whole * page_size
        rest = tl.where(whole < passing - above, left, 0)
        of_last = tl.where(last_above, in_last, tl.minimum(left - rest, in_last))
        # whole pages first, then the one in part, then the last: so a token's page is found by division
        is_above, is_between = key >= high, (key >= low) & (key < high)
        both = tl.where(is_above, 1, tl.where(is_between, 1 << 16, 0))
        before = tl.cumsum(both, 0) - both
        above_before, between_before = before & 0xFFFF, before >> 16
        in_part = is_between & (between_before == whole) & (rest > 0)
        taken = is_above | (is_between & (between_before < whole)) | in_part
        place = tl.where(in_part, above + whole, above_before + tl.minimum(between_before, whole))
        tl.store(tokens + place * page_size, p * page_size, mask=taken)
        tl.debug_barrier()
        # each page's first token is there; the others follow, unless a page has one
        first_of_last = wanted - of_last
        for start in range(tl.where(page_size > 1, 0, wanted), wanted + 1, BLOCK_T):
            i = start + tl.arange(0, BLOCK_T)
            offset = i % page_size
            is_earlier = i < first_of_last
            token = tl.load(tokens + i - offset, mask=is_earlier & (offset > 0), other=0) + offset
            token = tl.where(is_earlier, token, last_page * page_size + i - first_of_last)
            token = tl.where(i == wanted, length - 1, token)
            tl.store(tokens + i, token, mask=(i <= wanted) & ((offset > 0) | (i >= first_of_last)))
    tl.store(count_ptr + bh, wanted + 1)


@triton.jit
def _gather_attend_kernel(
    query_ptr, arena_ptr, heads_ptr, token_ptr, count_ptr, sink_ptr, partial_ptr, lse_ptr, counter_ptr,
    out_ptr, scale_log2, cap_log2, max_tokens, num_kv_heads,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
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
