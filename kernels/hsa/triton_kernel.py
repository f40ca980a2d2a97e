"""Hybrid sparse attention in Triton: append and score pages, select tokens, attend to them; three launches.

    _score_pages_kernel    (head, block of pages): ranks channels, writes the new row, folds it into its
                           page's extremes, scores its pages, leaves a partial log-sum-exp
    _select_tokens_kernel  (head): softmax over tokens, mean over the group, top-k2 without a sort
    _gather_attend_kernel  (head, split): exact attention to the chosen rows, combined by the last split

Rows and page extremes come through descriptors (`descriptors.ROW_FIELDS`, then `HSA_FIELDS`), so sequences
with other page sizes, budgets and lengths share a launch. Page extremes are read a channel at a time:
contiguous along pages is what the kernel wants (`page_stride` 1), any strides are what it accepts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import (
    MIN_SPLIT_BYTES,
    block_tokens,
    decode_warps,
    dot_dtype,
)
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.hsa.descriptors import BLOCK_PAGES, FIELDS, HsaScratch, hsa_scratch
from kvferry.kernels.split_attention import (
    LOG2_E,
    MIN_BLOCK_G,
    attend_tile,
    finish_split,
    load_queries,
    split_range,
)
from kvferry.kernels.split_workspace import choose_num_splits


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
        # the newest token is always in; the others compete for what is left, page by page
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


@triton.jit
def _gather_attend_kernel(
    query_ptr, arena_ptr, heads_ptr, token_ptr, count_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr,
    scale_log2, max_tokens,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    bh, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    key_offset = tl.multiple_of(tl.load(heads_ptr + bh * FIELDS), ALIGN)
    value_offset = tl.multiple_of(tl.load(heads_ptr + bh * FIELDS + 1), ALIGN)
    count = tl.load(count_ptr + bh)
    begin, end, active = split_range(tl.cdiv(count, BLOCK_N), split, num_splits, MIN_TILES)
    if split < active:
        g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        q = load_queries(query_ptr, bh, g, d, G, D, DOT)
        highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for tile in range(begin, end):
            i = tile * BLOCK_N + n
            ok = i < count
            token = tl.load(token_ptr + bh.to(tl.int64) * max_tokens + i, mask=ok, other=0)
            at = token.to(tl.int64)[:, None] * D + d[None, :]
            mask = ok[:, None] & (d[None, :] < D)
            k = tl.load(arena_ptr + key_offset + at, mask=mask, other=0.0).to(DOT)
            v = tl.load(arena_ptr + value_offset + at, mask=mask, other=0.0).to(DOT)
            highest, total, acc = attend_tile(q, k, v, ok, highest, total, acc, scale_log2)
        finish_split(
            acc, highest, total, partial_ptr, lse_ptr, counter_ptr, out_ptr, bh,
            bh * num_splits + split, bh * num_splits, active, g, d, G, D, BLOCK_SPLITS,
        )  # fmt: skip


def append_and_attend_batch(
    queries: Tensor,
    arena: Tensor,
    heads: Tensor,
    *,
    max_channels: int,
    page_stride: int,
    scaling: float,
    scratch: HsaScratch,
    num_splits: int,
    output: Tensor,
    new_keys: Tensor | None = None,
    new_values: Tensor | None = None,
) -> None:
    """Append one row to every sequence of a batch where there is one, and attend as `hsa.attend` does.

    Args:
        queries: contiguous `[B, H_kv, G, D]`.
        arena: the buffer that offsets count from, in the queries' dtype; rows are D elements apart.
        heads: int64 `[B * H_kv, FIELDS]`; lengths include the new row. A head of length 0 has an output of 0.
        max_channels: the largest k1 of the batch.
        page_stride: elements between pages of a channel.
        scratch: for at least B * H_kv heads; its `max_pages` is at most MAX_PAGES, and its `max_tokens` at
            least the largest min(k2, length).
        new_keys, new_values: contiguous `[B, H_kv, D]`, or both None: the rows are there already.
        output: out, contiguous `[B, H_kv, G, D]`.
    """
    score_pages(
        queries,
        arena,
        heads,
        max_channels=max_channels,
        page_stride=page_stride,
        scratch=scratch,
        new_keys=new_keys,
        new_values=new_values,
    )
    select_tokens(heads, scratch, group_size=queries.shape[2])
    attend_selected(
        queries, arena, heads, scaling=scaling, scratch=scratch, num_splits=num_splits, output=output
    )


def score_pages(
    queries: Tensor,
    arena: Tensor,
    heads: Tensor,
    *,
    max_channels: int,
    page_stride: int,
    scratch: HsaScratch,
    new_keys: Tensor | None,
    new_values: Tensor | None,
) -> None:
    """The first launch of `append_and_attend_batch`, whose arguments these are."""
    group_size, head_dim = queries.shape[2:]
    max_pages, num_blocks = scratch.scores.shape[2], scratch.partial.shape[1]
    _score_pages_kernel[(heads.shape[0], num_blocks)](
        queries, arena, queries if new_keys is None else new_keys,
        queries if new_values is None else new_values, heads, scratch.scores, scratch.partial,
        page_stride, max_pages,
        G=group_size, BLOCK_G=MIN_BLOCK_G, D=head_dim, BLOCK_D=_block_d(head_dim),
        BLOCK_K1=max(triton.next_power_of_2(max_channels), 16), BLOCK_P=BLOCK_PAGES,
        APPEND=new_keys is not None, FIELDS=FIELDS, ALIGN=ALIGNMENT_BYTES // queries.element_size(),
        DOT=dot_dtype(queries.dtype), num_warps=8, num_stages=1,
    )  # fmt: skip


def select_tokens(heads: Tensor, scratch: HsaScratch, *, group_size: int) -> None:
    """The second launch of `append_and_attend_batch`: `scratch.tokens` and `counts` from its scores."""
    max_pages, num_blocks = scratch.scores.shape[2], scratch.partial.shape[1]
    _select_tokens_kernel[(heads.shape[0],)](
        scratch.scores, scratch.partial, heads, scratch.tokens, scratch.counts, max_pages, num_blocks,
        BLOCK_PAGES, scratch.tokens.shape[1],
        G=group_size, BLOCK_P=max(triton.next_power_of_2(max_pages), 128),
        BLOCK_B=triton.next_power_of_2(num_blocks), FIELDS=FIELDS, num_warps=8, num_stages=1,
    )  # fmt: skip


def attend_selected(
    queries: Tensor,
    arena: Tensor,
    heads: Tensor,
    *,
    scaling: float,
    scratch: HsaScratch,
    num_splits: int,
    output: Tensor,
) -> None:
    """The third launch of `append_and_attend_batch`: exact attention to `scratch.tokens`."""
    group_size, head_dim = queries.shape[2:]
    block_d = _block_d(head_dim)
    block_n = block_tokens(queries.dtype, block_d)
    _gather_attend_kernel[(heads.shape[0], num_splits)](
        queries, arena, heads, scratch.tokens, scratch.counts, scratch.splits.partial, scratch.splits.lse,
        scratch.splits.counters, output, scaling * LOG2_E, scratch.tokens.shape[1],
        G=group_size, BLOCK_G=MIN_BLOCK_G, D=head_dim, BLOCK_D=block_d, BLOCK_N=block_n,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        MIN_TILES=max(MIN_SPLIT_BYTES // (2 * block_n * head_dim * queries.element_size()), 1),
        FIELDS=FIELDS, ALIGN=ALIGNMENT_BYTES // queries.element_size(), DOT=dot_dtype(queries.dtype),
        num_warps=decode_warps(block_d), num_stages=3,
    )  # fmt: skip


def _block_d(head_dim: int) -> int:
    block_d: int = max(triton.next_power_of_2(head_dim), 16)
    return block_d


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    length: int,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """One sequence of `append_and_attend_batch`; arguments are checked by the dispatch in `__init__.py`.

    Args: new_key, new_value `[H_kv, D]`: row `length - 1`, or both None where it is there already.
    """
    num_kv_heads, group_size, head_dim = queries.shape
    splits = choose_num_splits(num_kv_heads, queries.device) if num_splits is None else num_splits
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    scratch = hsa_scratch(
        num_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        max_pages=page_max.shape[1],
        max_tokens=min(num_tokens, keys.shape[1]),
        num_splits=splits,
        device=queries.device,
    )
    heads = [
        (
            *(_distance(keys, tensor) + h * tensor.stride(0) for tensor in (keys, values)),
            length,
            *(_distance(keys, tensor) + h * tensor.stride(0) for tensor in (page_max, page_min)),
            page_max.stride(2),
            page_size,
            num_channels,
            num_tokens,
        )
        for h in range(num_kv_heads)
    ]
    append_and_attend_batch(
        queries.contiguous()[None],
        keys,
        torch.tensor(heads, dtype=torch.int64).to(queries.device, non_blocking=True),
        max_channels=num_channels,
        page_stride=page_max.stride(1),
        scaling=scaling,
        scratch=scratch,
        num_splits=splits,
        output=output[None],
        new_keys=None if new_key is None else new_key.contiguous(),
        new_values=None if new_value is None else new_value.contiguous(),
    )
    return output


def _distance(base: Tensor, tensor: Tensor) -> int:
    """Elements from the start of one tensor to the start of another, which need not share storage."""
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()
