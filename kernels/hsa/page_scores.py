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

from kvferry.kernels.split_attention import load_queries


@triton.jit
def _head(heads_ptr, bh, FIELDS: tl.constexpr):
    """Load a head's descriptor: its address, length, P and k1."""
    entry = heads_ptr + bh * FIELDS
    length, page_size, num_channels = tl.load(entry + 2), tl.load(entry + 6), tl.load(entry + 7)
    return entry, length.to(tl.int32), page_size.to(tl.int32), num_channels.to(tl.int32)


@triton.jit
def _rank_channels(
    query_ptr, bh, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return each channel's rank by sum_G |q| (the lowest wins ties), and its sum_G q: `[BLOCK_D]` each.

    Compares all pairs, which is faster than a sort. Channels at D and beyond rank last. A NaN counts as
    infinity, because ranks become addresses: they must be a permutation.
    """
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    columns = load_queries(query_ptr, bh, g, d, G, D, tl.float32)
    weight = tl.sum(tl.abs(columns), 0)
    weight = tl.where(d < D, tl.where(weight == weight, weight, float("inf")), -1.0)
    ahead = (weight[:, None] > weight[None, :]) | (
        (weight[:, None] == weight[None, :]) & (d[:, None] < d[None, :])
    )
    return tl.sum(ahead.to(tl.int32), 0), tl.sum(columns, 0)


@triton.jit
def _temperature(
    query_ptr, bh, kept, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return each query head's `sqrt(|q_I1|_1 / |q|_1)` (SparQ), 1 if it is zero on I1: `[BLOCK_G]`."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    size = tl.abs(load_queries(query_ptr, bh, g, d, G, D, tl.float32))
    whole = tl.sum(size, 1)
    part = tl.sum(tl.where(kept[None, :], size, 0.0), 1)
    return tl.where(part > 0, tl.sqrt(part / tl.where(whole > 0, whole, 1.0)), 1.0)


@triton.jit
def _append_row(
    arena_ptr, new_key_ptr, new_value_ptr, entry, bh, position, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write the new K and V as row `position`; returns the new K, `[BLOCK_D]`."""
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    key = tl.load(new_key_ptr + bh * D + d, mask=inside, other=0.0)
    value = tl.load(new_value_ptr + bh * D + d, mask=inside, other=0.0)
    row = position.to(tl.int64) * D + d
    tl.store(arena_ptr + tl.load(entry) + row, key, mask=inside)
    tl.store(arena_ptr + tl.load(entry + 1) + row, value, mask=inside)
    return key


@triton.jit
def _fold(arena_ptr, entry, key, position, page, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Fold a new K into its page's extremes; the first row of a page starts it."""
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    place = page + d * tl.load(entry + 5)
    first = position == page * tl.load(entry + 6).to(tl.int32)
    highest_ptr, lowest_ptr = arena_ptr + tl.load(entry + 3) + place, arena_ptr + tl.load(entry + 4) + place
    highest = tl.load(highest_ptr, mask=inside, other=0.0)
    lowest = tl.load(lowest_ptr, mask=inside, other=0.0)
    tl.store(highest_ptr, tl.where(first | (key > highest), key, highest), mask=inside)
    tl.store(lowest_ptr, tl.where(first | (key < lowest), key, lowest), mask=inside)


@triton.jit
def _write_scores(
    score_ptr, partial_ptr, bh, block, num_blocks, max_pages, logits, p, there, count,
    G: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Write pages' logits `[BLOCK_G, BLOCK_P]`, their maximum and sum of exponentials for `count` tokens a
    page."""
    g = tl.arange(0, BLOCK_G)
    logits = tl.where(there[None, :], logits, float("-inf"))
    highest = tl.max(logits, 1)
    total = tl.sum(tl.where(there[None, :], tl.exp2(logits - highest[:, None]) * count[None, :], 0.0), 1)
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
    ALIGN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    bh, program, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry, length, page_size, num_channels = _head(heads_ptr, bh, FIELDS)
    num_pages = tl.cdiv(length, page_size)
    last_page = num_pages - 1
    if (page_size > 1) & (program * BLOCK_P < num_pages):
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        rank, direction = _rank_channels(query_ptr, bh, G, BLOCK_G, D, BLOCK_D)
        scale = scale_log2 / _temperature(query_ptr, bh, rank < num_channels, G, BLOCK_G, D, BLOCK_D)
        # the channel of each rank, and which extreme it reads
        r = tl.arange(0, BLOCK_K1)
        here = rank[None, :] == r[:, None]
        channel = tl.sum(tl.where(here, d[None, :], 0), 1)
        positive = tl.sum(tl.where(here & (direction >= 0)[None, :], 1, 0), 1) > 0
        chosen = r < num_channels
        mask = (g[:, None] < G) & chosen[None, :]
        q = tl.load(query_ptr + (bh * G + g[:, None]) * D + channel[None, :], mask=mask, other=0.0).to(DOT)
        extreme = tl.where(positive, tl.load(entry + 3), tl.load(entry + 4))
        start = tl.multiple_of(extreme + channel * tl.load(entry + 5), ALIGN)
        # a bound of unknown divisibility would turn wide loads into two-byte loads
        readable = tl.multiple_of(tl.cdiv(num_pages, ALIGN) * ALIGN, ALIGN)
        for block in range(program, tl.cdiv(num_pages, BLOCK_P), num_programs):
            p = block * BLOCK_P + tl.arange(0, BLOCK_P)
            there = p < num_pages
            estimate = tl.load(
                arena_ptr + start[:, None] + p[None, :], mask=chosen[:, None] & (p < readable)[None, :],
                other=0.0,
            )  # fmt: skip
            if APPEND:
                # this block's own copy of the newest page: some of the fold below may be in memory already
                new = tl.load(new_key_ptr + bh * D + channel, mask=chosen, other=0.0)[:, None]
                better = (positive[:, None] & (new > estimate)) | (~positive[:, None] & (new < estimate))
                starts = length - 1 == last_page * page_size
                estimate = tl.where((p == last_page)[None, :] & (starts | better), new, estimate)
            estimate = tl.where(chosen[:, None] & there[None, :], estimate, 0.0).to(DOT)
            logits = tl.dot(q, estimate, input_precision="ieee") * scale[:, None]
            count = tl.minimum(length - p * page_size, page_size).to(tl.float32)
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
        if APPEND:  # noqa: SIM102, a constant: where it is false, nothing of the branch is compiled
            if last_page // BLOCK_P % num_programs == program:
                key = _append_row(arena_ptr, new_key_ptr, new_value_ptr, entry, bh, length - 1, D, BLOCK_D)
                _fold(arena_ptr, entry, key, length - 1, last_page, D, BLOCK_D)


@triton.jit
def _score_rows_kernel(
    query_ptr, arena_ptr, new_key_ptr, new_value_ptr, heads_ptr, score_ptr, partial_ptr, max_pages,
    scale_log2, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, APPEND: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    bh, program, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry, length, page_size, num_channels = _head(heads_ptr, bh, FIELDS)
    if (page_size == 1) & (program * BLOCK_P < length):
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        inside = d < D
        rank, _ = _rank_channels(query_ptr, bh, G, BLOCK_G, D, BLOCK_D)
        kept = rank < num_channels
        scale = scale_log2 / _temperature(query_ptr, bh, kept, G, BLOCK_G, D, BLOCK_D)
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
        if APPEND:  # noqa: SIM102, as above
            if (length - 1) // BLOCK_P % num_programs == program:
                _append_row(arena_ptr, new_key_ptr, new_value_ptr, entry, bh, length - 1, D, BLOCK_D)
