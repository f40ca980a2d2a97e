"""Dense decode attention in Triton: split-K over a head's rows; the last split to finish combines them.

One program per split; the G query heads of a group share every row it loads. Descriptors
(`kernels/descriptors.py`) locate rows. Lengths are read on the device, and splits are divided among heads
there, so that one long sequence among short ones is read by as many programs as a batch of long ones. Layers
with a window read its rows alone. Soft-capping and sinks are compiled where a layer has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dependent_launch import begin_after_others, dependent
from kvferry.kernels.descriptors import (
    ALIGNMENT_BYTES,
    WINDOW_FIELDS,
    SplitWorkspace,
    choose_num_programs,
    split_workspace,
    uniform_heads,
)
from kvferry.kernels.device_limits import RESERVED_BYTES, shared_bytes
from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.softmax import Scaling, as_softmax
from kvferry.kernels.split_attention import (
    LOG2_E,
    MIN_BLOCK_G,
    attend_tile,
    finish_split,
    first_state,
    load_queries,
    place_of,
    row_tiles,
    visible_rows,
)

MIN_SPLIT_BYTES = 32 << 10
"""The least K and V bytes of a split."""
MAX_REGISTERS = 128
"""Per thread: an SM then fits 16 warps, `CTAS_PER_SM` programs of four. Without a limit the compiler spills
registers to fit more programs than shared memory allows."""
MORE_REGISTERS = 168
"""With larger tiles: an SM then fits 12 warps, three programs of four. Fewer spill on sm_90."""
MOST_REGISTERS = 255
"""With tiles of 128 channels: two programs of an SM have all of a tile's loads under way."""

_SCRATCH_BYTES = 2 << 10


@triton.jit
def _dense_decode_kernel(
    query_ptr, key_ptr, value_ptr, heads_ptr, sink_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr,
    scale_log2, cap_log2, stride_row, num_heads, num_kv_heads,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr, ALIGN: tl.constexpr, FIELDS: tl.constexpr, DOT: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
    program = tl.program_id(0)
    bh, begin, end, first_program, num_splits = place_of(
        heads_ptr, num_heads, program, tl.num_programs(0), row_tiles, MIN_TILES, BLOCK_N, FIELDS, WINDOWED
    )
    if bh < num_heads:
        key_offset = tl.multiple_of(tl.load(heads_ptr + bh * FIELDS), ALIGN)
        value_offset = tl.multiple_of(tl.load(heads_ptr + bh * FIELDS + 1), ALIGN)
        first, length = visible_rows(heads_ptr, bh, bh < num_heads, FIELDS, WINDOWED)
        if WINDOWED:
            key_offset += first.to(tl.int64) * stride_row
            value_offset += first.to(tl.int64) * stride_row
        g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        q = load_queries(query_ptr, bh, g, d, G, D, DOT)
        highest, total = first_state(
            sink_ptr, bh % num_kv_heads, program == first_program, g, G, BLOCK_G, SINKS
        )
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for tile in range(begin, end):
            row = tile * BLOCK_N + n
            ok = row < length
            at = row.to(tl.int64)[:, None] * stride_row + d[None, :]
            mask = ok[:, None] & (d[None, :] < D)
            k = tl.load(key_ptr + key_offset + at, mask=mask, other=0.0).to(DOT)
            v = tl.load(value_ptr + value_offset + at, mask=mask, other=0.0).to(DOT)
            highest, total, acc = attend_tile(q, k, v, ok, highest, total, acc, scale_log2, cap_log2, CAPPED)
        finish_split(
            acc, highest, total, partial_ptr, lse_ptr, counter_ptr, out_ptr, bh,
            program, first_program, num_splits, g, d, G, D,
        )  # fmt: skip


def dense_decode_batch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: Tensor,
    *,
    row_stride: int,
    scaling: Scaling,
    workspace: SplitWorkspace,
    output: Tensor,
) -> None:
    """Compute softmax(scaling * q K^T) V, or as `Softmax` says, for one new token per sequence of a batch.

    One launch.

    Args:
        queries: contiguous `[B, H_kv, G, D]`.
        keys, values: the buffers that offsets count from (one arena, or two buffers), the queries' dtype.
        heads: int64 `[B * H_kv, F]`, see `descriptors`; a head without rows has an output of zero. With
            `WINDOW_FIELDS` columns, of layers with a window.
        row_stride: elements from one row to the next.
        workspace: of B * H_kv heads at least. The launch has a program for each of its slots, and these are
            more than the heads.
        output: out, contiguous `[B, H_kv, G, D]` in the queries' dtype.
    """
    batch_size, num_kv_heads, group_size, head_dim = queries.shape
    block_d = max(triton.next_power_of_2(head_dim), 16)
    block_n = block_tokens(queries, block_d)
    row_bytes = 2 * head_dim * queries.element_size()
    softmax = as_softmax(scaling)
    _dense_decode_kernel[(len(workspace.lse),)](
        queries, keys, values, heads, queries if softmax.sinks is None else softmax.sinks,
        workspace.partial, workspace.lse, workspace.counters, output,
        softmax.scaling * LOG2_E, softmax.softcap * LOG2_E, row_stride, batch_size * num_kv_heads,
        num_kv_heads,
        G=group_size, BLOCK_G=MIN_BLOCK_G, D=head_dim, BLOCK_D=block_d, BLOCK_N=block_n,
        MIN_TILES=max(MIN_SPLIT_BYTES // (block_n * row_bytes), 1),
        ALIGN=ALIGNMENT_BYTES // queries.element_size(),
        FIELDS=heads.shape[1], DOT=dot_dtype(queries.dtype), WINDOWED=heads.shape[1] == WINDOW_FIELDS,
        CAPPED=softmax.softcap > 0, SINKS=softmax.sinks is not None, **dependent(queries.device),
        num_warps=decode_warps(block_d), num_stages=3,
        # On an H200 one sequence of 128K takes 1.1 times as long with 168 of them (results/gpu, 2026-11-27)
        maxnreg=MOST_REGISTERS if block_d == 128 else MAX_REGISTERS,
    )  # fmt: skip


def dense_decode(queries: Tensor, keys: Tensor, values: Tensor, *, scaling: Scaling) -> Tensor:
    """Run one sequence of `dense_decode_batch`; `__init__.py` checks arguments."""
    num_kv_heads = queries.shape[0]
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    dense_decode_batch(
        queries.contiguous()[None],
        keys,
        values,
        uniform_heads(keys, values),
        row_stride=keys.stride(1),
        scaling=scaling,
        workspace=split_workspace(output, choose_num_programs(num_kv_heads, queries.device)),
        output=output[None],
    )
    return output


def block_tokens(queries: Tensor, block_d: int) -> int:
    """Return the rows per tile: the most with which a multiprocessor of the queries' device has two programs.

    A program has two stages of K and V in shared memory, the queries and some scratch. The interpreter has
    larger tiles, because its cost is per operation, not per element.
    """
    if interpreting():
        return 256
    row_bytes = block_d * queries.element_size()
    others = MIN_BLOCK_G * row_bytes + _SCRATCH_BYTES + RESERVED_BYTES
    for_rows = shared_bytes(queries.device) // 2 - others
    return next((size for size in (64, 32) if 4 * size * row_bytes <= for_rows), 16)


def decode_warps(block_d: int) -> int:
    """Choose warps per program: with four, an accumulator of 256 channels does not fit in the registers."""
    return 8 if block_d > 128 else 4


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of `tl.dot`'s operands: the interpreter multiplies bfloat16 wrongly."""
    if dtype == torch.float16:
        return tl.float16
    return tl.bfloat16 if dtype == torch.bfloat16 and not interpreting() else tl.float32
