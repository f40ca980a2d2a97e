"""TriZone attention in Triton: a prologue, then zones A, B and C of a whole batch in one launch.

_prologue_kernel  (entry): queries in the packed channels' order and scale; `scaled_queries.py`
_trizone_kernel   (item of the work list): logits of packed (`packed_item.py`, `tail_item.py`) or unpacked
                  rows, online softmax, V; the last item of a head combines them all
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import block_tokens, dot_dtype
from kvferry.kernels.descriptors import ALIGNMENT_BYTES, uniform_heads
from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.split_attention import (
    LOG2_E,
    MIN_BLOCK_G,
    attend_tile,
    combine_if_last,
    load_queries,
    log_sum,
    split_range,
    store_part,
)
from kvferry.kernels.split_workspace import SplitWorkspace, choose_num_splits, split_workspace
from kvferry.kernels.trizone.packed_item import packed_item
from kvferry.kernels.trizone.scaled_queries import STATISTICS, _prologue_kernel
from kvferry.kernels.trizone.tail_item import tail_item
from kvferry.kernels.trizone.work_list import (
    ENTRY_FIELDS,
    ITEM_FIELDS,
    WorkList,
    balanced_item_bytes,
    work_list,
)

BLOCK_CHANNELS = 64
"""K channels a tile."""
BLOCK_LANES = 8
"""Lanes per tile, half a token block. A tile's products are too small to divide among warps: every warp has
all of them, and with 16 lanes they do not fit in the registers."""
INTERPRETED_LANES = 64
"""Larger tiles for the interpreter, because its cost is per operation, not per element."""
MAX_REGISTERS = 255
"""Per thread. Without a limit the compiler spills to fit one more program an SM."""


@triton.jit
def _rows_item(
    query_ptr, key_ptr, value_ptr, heads_ptr, bh, split, num_splits, stride_row, scale_log2, partial_ptr,
    lse_ptr, slot, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, HEAD_FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One split of a head's unpacked rows (zone C)."""
    key_offset = tl.multiple_of(tl.load(heads_ptr + bh * HEAD_FIELDS), ALIGN)
    value_offset = tl.multiple_of(tl.load(heads_ptr + bh * HEAD_FIELDS + 1), ALIGN)
    length = tl.load(heads_ptr + bh * HEAD_FIELDS + 2).to(tl.int32)
    begin, end, _ = split_range(tl.cdiv(length, BLOCK_R), split, num_splits, 1)
    g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    q = load_queries(query_ptr, bh, g, d, G, D, DOT)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in range(begin, end):
        token = tile * BLOCK_R + n
        ok = token < length
        at = token.to(tl.int64)[:, None] * stride_row + d[None, :]
        mask = ok[:, None] & (d[None, :] < D)
        k = tl.load(key_ptr + key_offset + at, mask=mask, other=0.0).to(DOT)
        v = tl.load(value_ptr + value_offset + at, mask=mask, other=0.0).to(DOT)
        highest, total, acc = attend_tile(q, k, v, ok, highest, total, acc, scale_log2)
    store_part(partial_ptr, slot, acc / tl.where(total > 0, total, 1.0)[:, None], g, d, d < D, G, D)
    tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)


@triton.jit
def _trizone_kernel(
    query_ptr, key_ptr, value_ptr, heads_ptr, halves_ptr, words_ptr, bytes_ptr, floats_ptr, entries_ptr,
    items_ptr, scaled_ptr, statistics_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr, scale_log2, stride_row,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_SPLITS: tl.constexpr, FIELDS: tl.constexpr,
    ITEM: tl.constexpr, HEAD_FIELDS: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    item = items_ptr + slot * ITEM
    kind, source = tl.load(item), tl.load(item + 1)
    begin, end, bh = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    row = entries_ptr + source.to(tl.int64) * FIELDS
    scaled = scaled_ptr + source.to(tl.int64) * BLOCK_G * BLOCK_D
    statistics = statistics_ptr + source.to(tl.int64) * BLOCK_G * 8
    if kind == 0:
        packed_item(
            scaled, statistics, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
            slot, G, BLOCK_G, D, BLOCK_D, BLOCK_N, BLOCK_C, 2, ASM,
        )  # fmt: skip
    elif kind == 1:
        packed_item(
            scaled, statistics, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
            slot, G, BLOCK_G, D, BLOCK_D, BLOCK_N, BLOCK_C, 4, ASM,
        )  # fmt: skip
    elif kind == 2:
        packed_item(
            scaled, statistics, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
            slot, G, BLOCK_G, D, BLOCK_D, BLOCK_N, BLOCK_C, 8, ASM,
        )  # fmt: skip
    elif kind == 3:
        packed_item(
            scaled, statistics, halves_ptr, words_ptr, floats_ptr, row, begin, end, partial_ptr, lse_ptr,
            slot, G, BLOCK_G, D, BLOCK_D, BLOCK_N, BLOCK_C, 16, ASM,
        )  # fmt: skip
    elif kind == 4:
        _rows_item(
            query_ptr, key_ptr, value_ptr, heads_ptr, bh, begin, end, stride_row, scale_log2, partial_ptr,
            lse_ptr, slot, G, BLOCK_G, D, BLOCK_D, BLOCK_R, HEAD_FIELDS, ALIGN, DOT,
        )  # fmt: skip
    elif kind == 5:
        tail_item(
            scaled, statistics, halves_ptr, words_ptr, bytes_ptr, floats_ptr, row, partial_ptr, lse_ptr, slot,
            G, BLOCK_G, D, BLOCK_D, BLOCK_C,
        )  # fmt: skip
    if kind <= 5:
        combine_if_last(
            partial_ptr, lse_ptr, counter_ptr, out_ptr, bh, tl.load(item + 5), tl.load(item + 6),
            tl.arange(0, BLOCK_D), G, D, BLOCK_SPLITS,
        )  # fmt: skip


def trizone_decode_batch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: Tensor,
    codes: Tensor,
    work: WorkList,
    *,
    row_stride: int,
    scaling: float,
    scaled: Tensor,
    statistics: Tensor,
    workspace: SplitWorkspace,
    output: Tensor,
) -> None:
    """One decode step of a batch over its packed prompts and new rows: a prologue and one launch.

    Args:
        queries: contiguous `[B, H_kv, G, D]`.
        keys, values: the buffers that `heads` counts from (the arena, or two), the queries' dtype.
        heads: int64 `[B * H_kv, F]`, the new rows; see `kernels/descriptors.py`.
        codes: uint8, the buffer that the work list's offsets count from; 16-byte aligned.
        scaled, statistics: scratch, float16 `[entries, 16, D to a power of two]` and float32
            `[entries, 16, STATISTICS]`.
        workspace: of at least as many slots as the list has items.
        output: out, contiguous `[B, H_kv, G, D]` in the queries' dtype.
    """
    group_size, head_dim = queries.shape[2:]
    block_d = max(triton.next_power_of_2(head_dim), 16)
    usable = codes[: codes.numel() // 4 * 4]
    halves, words, floats = (usable.view(dtype) for dtype in (torch.float16, torch.int16, torch.float32))
    scale_log2 = scaling * LOG2_E
    shape = {
        "G": group_size,
        "BLOCK_G": MIN_BLOCK_G,
        "D": head_dim,
        "BLOCK_D": block_d,
        "FIELDS": ENTRY_FIELDS,
    }
    _prologue_kernel[(work.entries.shape[0],)](
        queries,
        words,
        floats,
        work.entries,
        scaled,
        statistics,
        scale_log2,
        **shape,
        num_warps=4 if block_d <= 128 else 8,
        num_stages=1,
    )
    _trizone_kernel[(work.items.shape[0],)](
        queries, keys, values, heads, halves, words, codes, floats, work.entries, work.items, scaled,
        statistics, workspace.partial, workspace.lse, workspace.counters, output, scale_log2, row_stride,
        **shape,
        BLOCK_N=INTERPRETED_LANES if interpreting() else BLOCK_LANES, BLOCK_C=BLOCK_CHANNELS,
        BLOCK_R=block_tokens(queries.dtype, block_d),
        BLOCK_SPLITS=triton.next_power_of_2(work.max_items_per_head), ITEM=ITEM_FIELDS,
        HEAD_FIELDS=heads.shape[1], ALIGN=ALIGNMENT_BYTES // queries.element_size(),
        DOT=dot_dtype(queries.dtype), ASM=not interpreting(),
        # as few as fit the accumulators: every warp computes the same products
        num_warps=2 if block_d <= 128 else 4, num_stages=2, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
    item_bytes: int | None = None,
    row_splits: int = 1,
) -> Tensor:
    """One sequence of `trizone_decode_batch`; `__init__.py` checks arguments."""
    num_kv_heads, group_size, head_dim = queries.shape
    device = queries.device
    # layers without bytes still need a valid pointer
    codes = next((s.buffer for s in segments if s.buffer.numel()), queries.new_zeros(16, dtype=torch.uint8))
    if item_bytes is None:
        item_bytes = balanced_item_bytes([segments], num_kv_heads * choose_num_splits(num_kv_heads, device))
    work = work_list([segments], codes, row_splits=row_splits, item_bytes=item_bytes)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    num_entries, num_items = work.entries.shape[0], work.items.shape[0]
    trizone_decode_batch(
        queries.contiguous()[None],
        new_keys,
        new_values,
        uniform_heads(
            key_stride=new_keys.stride(0),
            value_stride=new_values.stride(0),
            lengths=[new_keys.shape[1]] * num_kv_heads,
            device=device,
        ),
        codes,
        work,
        row_stride=new_keys.stride(1),
        scaling=scaling,
        scaled=torch.empty(num_entries, MIN_BLOCK_G, block_d, dtype=torch.float16, device=device),
        statistics=torch.empty(num_entries, MIN_BLOCK_G, STATISTICS, dtype=torch.float32, device=device),
        workspace=split_workspace(
            num_heads=num_kv_heads,
            num_slots=num_items,
            group_size=group_size,
            head_dim=head_dim,
            device=device,
        ),
        output=output[None],
    )
    return output
