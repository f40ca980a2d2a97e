"""HSA's third launch in Triton: exact attention to the chosen rows.

    _gather_attend_kernel  (head, split): rows gathered by token, combined by the last split

Imported only by `triton_kernel.py`, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.split_attention import attend_tile, finish_split, load_queries, split_range


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
