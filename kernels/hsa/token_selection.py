"""HSA's second launch in Triton: the k2 tokens whose pages score highest.

    _select_tokens_kernel  (head): softmax over tokens, mean over the group, top-k2 without a sort

Imported only by `triton_kernel.py`, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _page_keys(
    score_ptr, partial_ptr, bh, p, num_pages, block_pages, max_pages, num_blocks,
    G: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Each page's share of one token, mean over the group, as an integer of the same order; -1 beyond."""
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
    return tl.where(p < num_pages, (score / G).to(tl.int32, bitcast=True), -1)


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
        # the largest bound that still lets `wanted` tokens pass, two bits a step
        bound = tl.zeros([1], tl.int32)
        for step in tl.static_range(15):
            digit = tl.zeros([1], tl.int32)
            for candidate in tl.static_range(1, 4):
                passing = tl.sum(tl.where(key >= bound + (candidate << (28 - 2 * step)), size, 0), 0)
                digit += (passing >= wanted).to(tl.int32)
            bound += digit << (28 - 2 * step)
        above = tl.where(key > bound, size, 0)
        equal = tl.where(key == bound, size, 0)
        left = wanted - tl.sum(above, 0)
        before = tl.cumsum(equal, 0) - equal
        take = above + tl.minimum(equal, tl.maximum(left - before, 0))
        place = tl.cumsum(take, 0) - take
        for j in range(0, page_size):
            tl.store(tokens + place + j, p * page_size + j, mask=j < take)
        tl.store(tokens + wanted, length - 1)
    tl.store(count_ptr + bh, wanted + 1)
