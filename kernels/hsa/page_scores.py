"""HSA's first launch in Triton: a batch's new rows, and every page's logit.

    _score_pages_kernel  (head, block of pages): ranks channels, writes the new row, folds it into its page's
                         extremes, scores its pages, leaves a partial log-sum-exp

Page extremes are read a channel at a time: contiguous along pages is what the kernel wants (`page_stride` 1),
any strides are what it accepts. Imported by `triton_kernel.py` only, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.split_attention import load_queries


@triton.jit
def _rank_channels(
    query_ptr, bh, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Of each channel: its rank by sum_G |q|, the lowest first among equals, and sum_G q: `[BLOCK_D]` each.

    By comparing all pairs; a sort is longer. Channels at D and beyond rank last.
    """
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    columns = load_queries(query_ptr, bh, g, d, G, D, tl.float32)
    weight = tl.where(d < D, tl.sum(tl.abs(columns), 0), -1.0)
    ahead = (weight[:, None] > weight[None, :]) | (
        (weight[:, None] == weight[None, :]) & (d[:, None] < d[None, :])
    )
    return tl.sum(ahead.to(tl.int32), 0), tl.sum(columns, 0)


@triton.jit
def _temperature(
    query_ptr, bh, kept, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """SparQ's `sqrt(D |q_I1|_1 / |q|_1)` of each query head, 1 for a head that is zero on I1: `[BLOCK_G]`."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    size = tl.abs(load_queries(query_ptr, bh, g, d, G, D, tl.float32))
    whole = tl.sum(size, 1)
    part = tl.sum(tl.where(kept[None, :], size, 0.0), 1)
    return tl.where(part > 0, tl.sqrt(D * part / tl.where(whole > 0, whole, 1.0)), 1.0)


@triton.jit
def _append(
    keys_ptr, new_key_ptr, new_value_ptr, heads_ptr, bh, position, page, page_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Write the new K and V as row `position` and fold K into its page; the first row of a page starts it."""
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    entry = heads_ptr + bh * FIELDS
    key = tl.load(new_key_ptr + bh * D + d, mask=inside, other=0.0)
    value = tl.load(new_value_ptr + bh * D + d, mask=inside, other=0.0)
    row = position.to(tl.int64) * D + d
    tl.store(keys_ptr + tl.load(entry) + row, key, mask=inside)
    tl.store(keys_ptr + tl.load(entry + 1) + row, value, mask=inside)
    place = page.to(tl.int64) * page_stride + d * tl.load(entry + 5)
    first = position == page * tl.load(entry + 6).to(tl.int32)
    highest_ptr, lowest_ptr = keys_ptr + tl.load(entry + 3) + place, keys_ptr + tl.load(entry + 4) + place
    highest = tl.load(highest_ptr, mask=inside, other=0.0)
    lowest = tl.load(lowest_ptr, mask=inside, other=0.0)
    tl.store(highest_ptr, tl.where(first | (key > highest), key, highest), mask=inside)
    tl.store(lowest_ptr, tl.where(first | (key < lowest), key, lowest), mask=inside)


@triton.jit
def _score_pages_kernel(
    query_ptr, arena_ptr, new_key_ptr, new_value_ptr, heads_ptr, score_ptr, partial_ptr,
    page_stride, max_pages,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K1: tl.constexpr,
    BLOCK_P: tl.constexpr, APPEND: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    bh, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry = heads_ptr + bh * FIELDS
    length = tl.load(entry + 2).to(tl.int32)
    page_size = tl.load(entry + 6).to(tl.int32)
    num_channels = tl.load(entry + 7).to(tl.int32)
    num_pages = tl.cdiv(length, page_size)
    last_page = num_pages - 1
    if block * BLOCK_P < num_pages:
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        rank, direction = _rank_channels(query_ptr, bh, G, BLOCK_G, D, BLOCK_D)
        scale = 1.4426950408889634 / _temperature(query_ptr, bh, rank < num_channels, G, BLOCK_G, D, BLOCK_D)
        # the channel of each rank, and which extreme it reads
        r = tl.arange(0, BLOCK_K1)
        here = rank[None, :] == r[:, None]
        channel = tl.sum(tl.where(here, d[None, :], 0), 1)
        positive = tl.sum(tl.where(here & (direction >= 0)[None, :], 1, 0), 1) > 0
        chosen = r < num_channels
        mask = (g[:, None] < G) & chosen[None, :]
        q = tl.load(query_ptr + (bh * G + g[:, None]) * D + channel[None, :], mask=mask, other=0.0).to(DOT)

        p = block * BLOCK_P + tl.arange(0, BLOCK_P)
        there = p < num_pages
        # a bound of unknown divisibility would turn wide loads into two-byte ones
        readable = p < tl.multiple_of(tl.cdiv(num_pages, ALIGN) * ALIGN, ALIGN)
        if page_stride != 1:
            readable = there
        extreme = tl.where(positive, tl.load(entry + 3), tl.load(entry + 4))
        start = extreme + channel * tl.load(entry + 5)
        if page_stride == 1:
            start = tl.multiple_of(start, ALIGN)
        estimate = tl.load(
            arena_ptr + start[:, None] + p[None, :] * page_stride,
            mask=chosen[:, None] & readable[None, :], other=0.0,
        )  # fmt: skip
        if APPEND:
            # this block's copy of the newest page, whatever of the fold below is in memory already
            new = tl.load(new_key_ptr + bh * D + channel, mask=chosen, other=0.0)[:, None]
            better = (positive[:, None] & (new > estimate)) | (~positive[:, None] & (new < estimate))
            starts = length - 1 == last_page * page_size
            estimate = tl.where((p == last_page)[None, :] & (starts | better), new, estimate)
        estimate = tl.where(chosen[:, None] & there[None, :], estimate, 0.0).to(DOT)
        logits = tl.dot(q, estimate, input_precision="ieee") * scale[:, None]
        logits = tl.where(there[None, :], logits, float("-inf"))
        count = tl.minimum(length - p * page_size, page_size).to(tl.float32)
        highest = tl.max(logits, 1)
        total = tl.sum(tl.where(there[None, :], tl.exp2(logits - highest[:, None]) * count[None, :], 0.0), 1)
        score = score_ptr + (bh * G + g[:, None]).to(tl.int64) * max_pages + p[None, :]
        tl.store(score, logits, mask=(g[:, None] < G) & there[None, :])
        part = partial_ptr + ((bh * num_blocks + block) * G + g) * 2
        tl.store(part, highest, mask=g < G)
        tl.store(part + 1, total, mask=g < G)
        if APPEND:  # noqa: SIM102, a constant: without it nothing of the branch is compiled
            if block == last_page // BLOCK_P:
                _append(
                    arena_ptr, new_key_ptr, new_value_ptr, heads_ptr, bh, length - 1, last_page, page_stride,
                    D, BLOCK_D, FIELDS,
                )  # fmt: skip
