"""Chunk scores in Triton: one program per chunk of one KV head, so no atomic additions.

It computes each query row's log2-sum-exp over the chunk, writes them to its own scratch memory, then
recomputes the logits and sums each key's probabilities over the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import dot_dtype
from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.split_attention import LOG2_E

MAX_REGISTERS = {4: 168, 8: 128}
"""Per thread, by warps per program: for three programs an SM, or two, as many as shared memory allows."""
PADDED_REGISTERS = 192
"""At head sizes between powers of two, whose masks take a few more registers: fewer spill."""


@triton.jit
def _load_rows(ptr, start, index, count, stride_row, d, D: tl.constexpr, DOT: tl.constexpr):
    at = start + index.to(tl.int64)[:, None] * stride_row + d[None, :]
    return tl.load(ptr + at, mask=(index[:, None] < count) & (d[None, :] < D), other=0.0).to(DOT)


@triton.jit(do_not_specialize=["chunk_tokens", "num_tokens", "num_queries"])
def _chunk_scores_kernel(
    query_ptr, key_ptr, lse_ptr, out_ptr, scale_log2, chunk_tokens, num_tokens, num_queries,
    stride_head, stride_row,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # chunks are on the grid's first axis, the only one that may exceed 65,535
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = chunk * chunk_tokens
    count = tl.minimum(num_tokens - first, chunk_tokens)
    # the chunk's own queries, or the shared ones
    rows = num_queries if SHARED else count
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    keys = head.to(tl.int64) * stride_head + first.to(tl.int64) * stride_row
    most_rows = num_queries if SHARED else chunk_tokens
    scratch = lse_ptr + (head * tl.num_programs(0) + chunk).to(tl.int64) * G * most_rows
    for g in range(0, G):
        start = ((head * G + g).to(tl.int64) * num_queries + (0 if SHARED else first)) * D
        for block in range(0, tl.cdiv(rows, BLOCK_M)):
            i = block * BLOCK_M + m
            q = _load_rows(query_ptr, start, i, rows, D, d, D, DOT)
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for tile in range(0, tl.cdiv(count, BLOCK_N)):
                t = tile * BLOCK_N + n
                k = _load_rows(key_ptr, keys, t, count, stride_row, d, D, DOT)
                logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
                logits = tl.where(t[None, :] < count, logits, float("-inf"))
                new_highest = tl.maximum(highest, tl.max(logits, 1))
                total = total * tl.exp2(highest - new_highest)
                total += tl.sum(tl.exp2(logits - new_highest[:, None]), 1)
                highest = new_highest
            tl.store(scratch + g * rows + i, highest + tl.log2(total), mask=i < rows)
    # the rows' sums are read by other threads than those that wrote them
    tl.debug_barrier()
    share = 1.0 / G
    if SHARED:
        share = count.to(tl.float32) / (rows * G)
    for tile in range(0, tl.cdiv(count, BLOCK_N)):
        t = tile * BLOCK_N + n
        k = _load_rows(key_ptr, keys, t, count, stride_row, d, D, DOT)
        sums = tl.zeros([BLOCK_N], tl.float32)
        for g in range(0, G):
            start = ((head * G + g).to(tl.int64) * num_queries + (0 if SHARED else first)) * D
            for block in range(0, tl.cdiv(rows, BLOCK_M)):
                i = block * BLOCK_M + m
                q = _load_rows(query_ptr, start, i, rows, D, d, D, DOT)
                lse = tl.load(scratch + g * rows + i, mask=i < rows, other=0.0)
                logits = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2 - lse[None, :]
                # at most 0 except for rounding, which is unbounded where logits are large; NaN stays NaN
                logits = tl.where(logits > 0, 0.0, logits)
                sums += tl.sum(tl.exp2(tl.where(i[None, :] < rows, logits, float("-inf"))), 1)
        tl.store(out_ptr + head.to(tl.int64) * num_tokens + first + t, sums * share, mask=t < count)


def chunk_scores(queries: Tensor, keys: Tensor, *, chunk_tokens: int, scaling: float, shared: bool) -> Tensor:
    """Compute `chunk_scores`, of shared queries or not; see `__init__.py`, which checks arguments."""
    num_kv_heads, group_size, num_queries, head_dim = queries.shape
    num_tokens, device = keys.shape[1], keys.device
    scores = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=device)
    if num_tokens == 0:
        return scores
    chunk = min(chunk_tokens, num_tokens)
    num_chunks = triton.cdiv(num_tokens, chunk)
    rows = num_queries if shared else chunk
    lse = torch.empty(num_kv_heads * num_chunks * group_size * rows, dtype=torch.float32, device=device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    largest = 256 if interpreting() else 64
    num_warps = 8 if block_d > 128 else 4
    _chunk_scores_kernel[(num_chunks, num_kv_heads)](
        queries.contiguous(), keys, lse, scores, scaling * LOG2_E, chunk, num_tokens, num_queries,
        keys.stride(0), keys.stride(1),
        G=group_size, D=head_dim, BLOCK_D=block_d,
        BLOCK_M=min(max(triton.next_power_of_2(rows), 16), largest),
        BLOCK_N=min(max(triton.next_power_of_2(chunk), 16), largest),
        SHARED=shared, DOT=dot_dtype(queries.dtype), num_warps=num_warps, num_stages=2,
        maxnreg=PADDED_REGISTERS if num_warps == 4 and head_dim != block_d else MAX_REGISTERS[num_warps],
    )  # fmt: skip
    return scores
