"""HSA's first launch in Triton: a batch's new rows, and every page's logit.

    _score_pages_kernel  (head, program): ranks channels once; scores every so many blocks of pages by their
                         extremes and writes their partial log-sum-exp; one of the head's programs writes the
                         new row and folds it into its page's extremes
    _score_rows_kernel   (head, program): the same for pages of one token, whose key is its extremes

A batch may have heads of either kind; each launch skips the other's heads. Imported only by
`triton_kernel.py`, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.dependent_launch import begin_after_others
from kvferry.kernels.split_attention import load_queries

_RANKED_AT_ONCE = tl.constexpr(128)
"""Channels that are compared with all others at once: a thread has registers for so many."""


@triton.jit
def _head(heads_ptr, bh, FIELDS: tl.constexpr):
    """Load a head's descriptor: its address, length, P and k1."""
    entry = heads_ptr + bh * FIELDS
    length, page_size, num_channels = tl.load(entry + 2), tl.load(entry + 6), tl.load(entry + 7)
    return entry, length.to(tl.int32), page_size.to(tl.int32), num_channels.to(tl.int32)


@triton.jit
def _sum_queries(query_ptr, bh, d, G: tl.constexpr, D: tl.constexpr):
    """Return sum_G |q| and sum_G q of channels d, both added head by head: one-dimensional as d."""
    weight, direction = tl.zeros_like(d).to(tl.float32), tl.zeros_like(d).to(tl.float32)
    for head in tl.static_range(G):
        q = tl.load(query_ptr + (bh * G + head) * D + d, mask=d < D, other=0.0).to(tl.float32)
        weight += tl.abs(q)
        direction += q
    return weight, direction


@triton.jit
def _rank_channels(weight, D: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return each channel's rank by its weight, at least 0: `[BLOCK_D]`; the lowest channel wins ties.

    Compares all pairs, which is faster than a sort, `AT_ONCE` channels with all, as integers that end in the
    channel, so that one comparison does. Channels at D and beyond rank last. A NaN counts as infinity,
    because ranks become addresses: they must be a permutation.
    """
    d = tl.arange(0, BLOCK_D)
    # floats that are not negative are in the order of their bits
    bits = tl.where(weight == weight, weight, float("inf")).to(tl.int32, bitcast=True)
    bits = tl.where(d < D, bits, -1)
    rank = tl.zeros([BLOCK_D], tl.int32)
    for first in range(0, BLOCK_D, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        of_other = bits if AT_ONCE == BLOCK_D else tl.gather(bits, other, 0)
        key = (bits[None, :].to(tl.int64) << 32) | (BLOCK_D - 1 - d)[None, :]
        other_key = (of_other[:, None].to(tl.int64) << 32) | (BLOCK_D - 1 - other)[:, None]
        rank += tl.sum(tl.where(other_key > key, 1, 0), 0)
    return rank


@triton.jit
def _as_float(number):
    """Return an integer of at least 0 and below 2^23 as a float; a conversion takes longer."""
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _temperature(size, kept):
    """Return each query head's `sqrt(|q_I1|_1 / |q|_1)` (SparQ), 1 if it is zero on I1: `[BLOCK_G]`.

    Args: size: |q|, `[BLOCK_G, BLOCK_D]`.
    """
    whole = tl.sum(size, 1)
    part = tl.sum(tl.where(kept[None, :], size, 0.0), 1)
    return tl.where(part > 0, tl.sqrt(part / tl.where(whole > 0, whole, 1.0)), 1.0)


@triton.jit
def _append_row(
    arena_ptr, new_key_ptr, new_value_ptr, entry, bh, position, here, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write the new K and V as row `position` if `here`, and return the new K, `[BLOCK_D]`; else zeros."""
    d = tl.arange(0, BLOCK_D)
    inside = (d < D) & here
    key = tl.load(new_key_ptr + bh * D + d, mask=inside, other=0.0)
    value = tl.load(new_value_ptr + bh * D + d, mask=inside, other=0.0)
    row = position.to(tl.int64) * D + d
    tl.store(arena_ptr + tl.load(entry) + row, key, mask=inside)
    tl.store(arena_ptr + tl.load(entry + 1) + row, value, mask=inside)
    return key


@triton.jit
def _fold(arena_ptr, entry, key, starts, page, here, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Fold a new K into its page's extremes if `here`, and return them, `[BLOCK_D]` each; else zeros.

    Args: starts: whether the page starts with this row.
    """
    d = tl.arange(0, BLOCK_D)
    inside = (d < D) & here
    place = page + d * tl.load(entry + 5)
    highest_ptr, lowest_ptr = arena_ptr + tl.load(entry + 3) + place, arena_ptr + tl.load(entry + 4) + place
    highest = tl.load(highest_ptr, mask=inside, other=0.0)
    lowest = tl.load(lowest_ptr, mask=inside, other=0.0)
    highest = tl.where(starts | (key > highest), key, highest)
    lowest = tl.where(starts | (key < lowest), key, lowest)
    tl.store(highest_ptr, highest, mask=inside)
    tl.store(lowest_ptr, lowest, mask=inside)
    return highest, lowest


@triton.jit
def _write_scores(
    score_ptr, partial_ptr, bh, block, num_blocks, max_pages, logits, p, there, count,
    G: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Write pages' logits `[BLOCK_G, BLOCK_P]`, their maximum and sum of exponentials for `count` tokens a
    page. One page at least is `there`."""
    g = tl.arange(0, BLOCK_G)
    logits = tl.where(there[None, :], logits, float("-inf"))
    highest = tl.max(logits, 1)
    total = tl.sum(tl.exp2(logits - highest[:, None]) * count[None, :], 1)
    score = score_ptr + (bh * G + g[:, None]).to(tl.int64) * max_pages + p[None, :]
    tl.store(score, logits, mask=(g[:, None] < G) & there[None, :])
    part = partial_ptr + ((bh * num_blocks + block) * G + g) * 2
    tl.store(part, highest, mask=g < G)
    tl.store(part + 1, total, mask=g < G)


@triton.jit
def _score_pages_kernel(
    query_ptr, arena_ptr, new_key_ptr, new_value_ptr, heads_ptr, score_ptr, partial_ptr, max_pages,
    scale_log2, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K1: tl.constexpr, BLOCK_P: tl.constexpr, APPEND: tl.constexpr, FIELDS: tl.constexpr,
    ALIGN: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
    bh, program, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry, length, page_size, num_channels = _head(heads_ptr, bh, FIELDS)
    num_pages = tl.cdiv(length, page_size)
    last_page = num_pages - 1
    if (page_size > 1) & (program * BLOCK_P < num_pages):
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        whole = load_queries(query_ptr, bh, g, d, G, D, tl.float32)
        if BLOCK_D <= 128:
            weight, direction = _sum_queries(query_ptr, bh, d, G, D)
        else:
            # the compiler would load so few numbers again and again rather than move them
            weight, direction = tl.sum(tl.abs(whole), 0), tl.sum(whole, 0)
        # of each row that is read: twice the channel, and 1 if its highest is read
        code = tl.zeros([BLOCK_K1], tl.int32)
        kept = d < D
        # a loop of one step, or of none where all channels are read: of straight-line code the compiler makes
        # a copy for each layout that the result is needed in
        for _ in range(0, tl.where(num_channels < D, 1, 0)):
            rank = _rank_channels(weight, D, BLOCK_D, min(BLOCK_D, _RANKED_AT_ONCE))
            kept = rank < num_channels
            if BLOCK_K1 < BLOCK_D:
                r = tl.arange(0, BLOCK_K1)
                # the one whose rank is r has nothing above 16 bits once r is taken out: it is the least
                ranked = (rank << 16) | (2 * d) | tl.where(direction >= 0, 1, 0)
                code = tl.min(ranked[:, None] ^ (r << 16)[None, :], 0)
        scale = scale_log2 / _temperature(tl.abs(whole), kept)
        in_last = length - last_page * page_size
        of_page = _as_float(tl.minimum(page_size, length))
        missing = of_page - _as_float(in_last)
        if APPEND:
            # the newest page's logit, because what memory has of that page may lack the new key; all in
            # float32, and only where it is used
            here = last_page // BLOCK_P % num_programs == program
            key = _append_row(arena_ptr, new_key_ptr, new_value_ptr, entry, bh, length - 1, here, D, BLOCK_D)
            highest, lowest = _fold(arena_ptr, entry, key, in_last == 1, last_page, here, D, BLOCK_D)
            newest = tl.where(kept, tl.where(direction >= 0, highest, lowest).to(tl.float32), 0.0)
            newest = tl.sum(whole * newest[None, :], 1) * scale
        # each row's channel, and which extreme it reads
        if BLOCK_K1 == BLOCK_D:
            channel, positive, chosen = d, direction >= 0, kept
        else:
            channel, positive, chosen = code >> 1, code % 2 == 1, tl.arange(0, BLOCK_K1) < num_channels
        mask = (g[:, None] < G) & chosen[None, :]
        q = tl.load(query_ptr + (bh * G + g[:, None]) * D + channel[None, :], mask=mask, other=0.0).to(DOT)
        extreme = tl.where(positive, tl.load(entry + 3), tl.load(entry + 4))
        start = arena_ptr + tl.multiple_of(extreme + channel * tl.load(entry + 5), ALIGN)
        # a bound of unknown divisibility would turn wide loads into two-byte loads
        readable = tl.multiple_of(tl.cdiv(num_pages, ALIGN) * ALIGN, ALIGN)
        for block in range(program, tl.cdiv(num_pages, BLOCK_P), num_programs):
            p = block * BLOCK_P + tl.arange(0, BLOCK_P)
            # zero in rows that are not chosen; a page that is not there spoils its own column only
            estimate = tl.load(
                start[:, None] + p[None, :], mask=chosen[:, None] & (p < readable)[None, :], other=0.0
            )
            logits = tl.dot(q, estimate.to(DOT), input_precision="ieee") * scale[:, None]
            if APPEND:
                logits = tl.where((p == last_page)[None, :], newest[:, None], logits)
            count = of_page - tl.where(p == last_page, missing, 0.0)
            _write_scores(
                score_ptr,
                partial_ptr,
                bh,
                block,
                tl.cdiv(max_pages, BLOCK_P),
                max_pages,
                logits,
                p,
                p < num_pages,
                count,
                G,
                BLOCK_G,
            )


@triton.jit
def _score_rows_kernel(
    query_ptr, arena_ptr, new_key_ptr, new_value_ptr, heads_ptr, score_ptr, partial_ptr, max_pages,
    scale_log2, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, APPEND: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
    bh, program, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry, length, page_size, num_channels = _head(heads_ptr, bh, FIELDS)
    if (page_size == 1) & (program * BLOCK_P < length):
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        inside = d < D
        weight, _ = _sum_queries(query_ptr, bh, d, G, D)
        kept = _rank_channels(weight, D, BLOCK_D, min(BLOCK_D, _RANKED_AT_ONCE)) < num_channels
        size = tl.abs(load_queries(query_ptr, bh, g, d, G, D, tl.float32))
        scale = scale_log2 / _temperature(size, kept)
        # at least half of the channels are chosen where a page is one token, so whole rows are read
        q = tl.where(kept[None, :], load_queries(query_ptr, bh, g, d, G, D, DOT), 0.0).to(DOT)
        start = tl.multiple_of(tl.load(entry), ALIGN)
        for block in range(program, tl.cdiv(length, BLOCK_P), num_programs):
            p = block * BLOCK_P + tl.arange(0, BLOCK_P)
            there = p < length
            keys = tl.load(
                arena_ptr + start + p[:, None].to(tl.int64) * D + d[None, :],
                mask=there[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            if APPEND:
                new = tl.load(new_key_ptr + bh * D + d, mask=inside, other=0.0)
                keys = tl.where((p == length - 1)[:, None], new[None, :], keys)
            logits = tl.dot(q, tl.trans(keys.to(DOT)), input_precision="ieee") * scale[:, None]
            count = there.to(tl.float32)
            _write_scores(
                score_ptr,
                partial_ptr,
                bh,
                block,
                tl.cdiv(max_pages, BLOCK_P),
                max_pages,
                logits,
                p,
                there,
                count,
                G,
                BLOCK_G,
            )
        if APPEND:
            here = (length - 1) // BLOCK_P % num_programs == program
            _append_row(arena_ptr, new_key_ptr, new_value_ptr, entry, bh, length - 1, here, D, BLOCK_D)
