"""Triton kernels that sum attention probabilities over queries without storing them, in two passes.

    _row_lse_kernel      (KV head, block of query rows, split of keys): log2-sum-exp of each query row, the
                         last split combining
    _column_sums_kernel  (unit, block of keys): recomputes the logits and sums each key's probabilities over
                         the unit's query rows; a program owns its keys, so nothing is added atomically

Serves `window_scores` (a unit is a KV head: all rows of its group) and `column_sums` (a unit is one query
head). Query row i of a head's W sits at position T - W + i and sees no later key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import dot_dtype
from kvferry.kernels.descriptors import MAX_SPLITS, choose_num_splits
from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.split_attention import LOG2_E

_SPLITS_AT_ONCE = tl.constexpr(16)
"""A constant, so that no kernel is compiled again for another number of splits."""


@triton.jit(do_not_specialize=["num_rows", "window", "num_tokens"])
def _row_lse_kernel(
    query_ptr, key_ptr, partial_ptr, counter_ptr, lse_ptr, scale_log2, num_rows, window, num_tokens,
    stride_head, stride_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    # blocks are on the grid's first axis, the only one that may exceed 65,535
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    i, n, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    row = head.to(tl.int64) * num_rows + i
    q_mask = (i[:, None] < num_rows) & (d[None, :] < D)
    q = tl.load(query_ptr + row[:, None] * D + d[None, :], mask=q_mask, other=0.0).to(DOT)
    position = num_tokens - window + i % window
    visible = tl.max(tl.where(i < num_rows, position, -1), 0) + 1
    num_tiles = tl.cdiv(visible, BLOCK_N)
    per_split = tl.cdiv(num_tiles, num_splits)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(split * per_split, tl.minimum((split + 1) * per_split, num_tiles)):
        t = tile * BLOCK_N + n
        at = head.to(tl.int64) * stride_head + t.to(tl.int64)[:, None] * stride_row + d[None, :]
        k_mask = (t[:, None] < num_tokens) & (d[None, :] < D)
        k = tl.load(key_ptr + at, mask=k_mask, other=0.0).to(DOT)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        logits = tl.where(t[None, :] <= position[:, None], logits, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        highest = new_highest
    own = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    blocks = tl.num_programs(0)
    first = ((head * blocks + block) * num_splits).to(tl.int64) * BLOCK_M
    tl.store(partial_ptr + first + split * BLOCK_M + tl.arange(0, BLOCK_M), own)
    tl.debug_barrier()
    done = tl.atomic_add(counter_ptr + head * blocks + block, 1, sem="acq_rel")
    if done == num_splits - 1:
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for first_split in range(0, num_splits, _SPLITS_AT_ONCE):
            s = first_split + tl.arange(0, _SPLITS_AT_ONCE)
            at = first + s[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            parts = tl.load(partial_ptr + at, mask=s[:, None] < num_splits, other=float("-inf"))
            new_highest = tl.maximum(highest, tl.max(parts, 0))
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(parts - base[None, :]), 0)
            highest = new_highest
        base = tl.where(highest == float("-inf"), 0.0, highest)
        tl.store(lse_ptr + row, base + tl.log2(total), mask=i < num_rows)


@triton.jit(do_not_specialize=["unit_rows", "window", "num_tokens"])
def _column_sums_kernel(
    query_ptr, key_ptr, lse_ptr, out_ptr, scale_log2, unit_rows, window, num_tokens, units_per_head,
    stride_head, stride_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    unit, tile = tl.program_id(0), tl.program_id(1)
    head = unit // units_per_head
    t, m, d = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at = head.to(tl.int64) * stride_head + t.to(tl.int64)[:, None] * stride_row + d[None, :]
    k_mask = (t[:, None] < num_tokens) & (d[None, :] < D)
    k = tl.load(key_ptr + at, mask=k_mask, other=0.0).to(DOT)
    # rows of one query head before the tile's first key see none of its keys
    unseen = tl.where(unit_rows == window, tl.maximum(tile * BLOCK_N - (num_tokens - window), 0), 0)
    sums = tl.zeros([BLOCK_N], tl.float32)
    for block in range(unseen // BLOCK_M, tl.cdiv(unit_rows, BLOCK_M)):
        i = block * BLOCK_M + m
        row = unit.to(tl.int64) * unit_rows + i
        q_mask = (i[:, None] < unit_rows) & (d[None, :] < D)
        q = tl.load(query_ptr + row[:, None] * D + d[None, :], mask=q_mask, other=0.0).to(DOT)
        lse = tl.load(lse_ptr + row, mask=i < unit_rows, other=0.0)
        logits = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2 - lse[None, :]
        position = num_tokens - window + i % window
        # at most 0 except for rounding, which is unbounded where logits are large; NaN stays NaN
        logits = tl.where(logits > 0, 0.0, logits)
        seen = (t[:, None] <= position[None, :]) & (i[None, :] < unit_rows)
        sums += tl.sum(tl.exp2(tl.where(seen, logits, float("-inf"))), 1)
    tl.store(out_ptr + unit.to(tl.int64) * num_tokens + t, sums, mask=t < num_tokens)


def attention_mass(queries: Tensor, keys: Tensor, *, scaling: float, per_query_head: bool) -> Tensor:
    """Sum each key's attention probability over the queries that see it.

    Args:
        queries: `[H_kv, G, W, D]`, row i at position T - W + i.
        keys: `[H_kv, T, D]`, rows contiguous.
        per_query_head: do not sum over the query heads of a group.

    Returns: float32 `[H_kv, T]`, or `[H_kv, G, T]`.
    """
    num_kv_heads, group_size, window, head_dim = queries.shape
    num_tokens, num_rows = keys.shape[1], group_size * window
    device = queries.device
    queries = queries.contiguous()
    block_d = max(triton.next_power_of_2(head_dim), 16)
    block_m = min(max(triton.next_power_of_2(num_rows), 16), 128 if block_d <= 128 else 64)
    block_n = 256 if interpreting() else 64
    num_blocks = triton.cdiv(num_rows, block_m)
    num_splits = min(choose_num_splits(num_kv_heads * num_blocks, device), MAX_SPLITS)
    partial = torch.empty(
        num_kv_heads * num_blocks * num_splits * block_m, dtype=torch.float32, device=device
    )
    counters = torch.zeros(num_kv_heads * num_blocks, dtype=torch.int32, device=device)
    lse = torch.empty(num_kv_heads, num_rows, dtype=torch.float32, device=device)
    shape = {"D": head_dim, "BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": block_n}
    options = {"DOT": dot_dtype(queries.dtype), "num_warps": 8 if block_m >= 64 else 4, "num_stages": 2}
    _row_lse_kernel[(num_blocks, num_kv_heads, num_splits)](
        queries, keys, partial, counters, lse, scaling * LOG2_E, num_rows, window, num_tokens,
        keys.stride(0), keys.stride(1), **shape, **options,
    )  # fmt: skip
    if per_query_head and block_d <= 128 and not interpreting():
        # every tile of keys reads the queries again, so tiles are large where there are many queries: this
        # takes half as long as tiles of 64 on an H200 (benchmarks/results/gpu/2026-11-28/call-6)
        block_n = 128
        options["num_warps"] = 4
    units = group_size if per_query_head else 1
    sums = torch.empty(num_kv_heads, units, num_tokens, dtype=torch.float32, device=device)
    _column_sums_kernel[(num_kv_heads * units, triton.cdiv(num_tokens, block_n))](
        queries, keys, lse, sums, scaling * LOG2_E, num_rows // units, window, num_tokens, units,
        keys.stride(0), keys.stride(1), **{**shape, "BLOCK_N": block_n}, **options,
    )  # fmt: skip
    return sums if per_query_head else sums[:, 0]
