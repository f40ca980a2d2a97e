"""TriZone attention in Triton: a prologue, then zones A, B and C of a whole batch in one launch.

_prologue_kernel  (entry): new rows, and queries in the packed channels' order; `scaled_queries.py`
_trizone_kernel   (item of the work list): online softmax over the item's rows, packed or not, `items.py`;
                  the last item of a head combines them all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import dot_dtype
from kvferry.kernels.dependent_launch import begin_after_others, dependent
from kvferry.kernels.descriptors import (
    ALIGNMENT_BYTES,
    SplitWorkspace,
    choose_num_splits,
    split_workspace,
    uniform_heads,
)
from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.packed.layer import ENTRY_FIELDS, PackedLayer
from kvferry.kernels.split_attention import LOG2_E, MIN_BLOCK_G, combine_if_last
from kvferry.kernels.trizone.items import packed_item, rows_item
from kvferry.kernels.trizone.scaled_queries import _prologue_kernel
from kvferry.kernels.trizone.work_list import ITEM_FIELDS, WorkList, work_list

BLOCK_CHANNELS = 64
"""K channels a tile."""
BLOCK_ROWS = 32
"""Unpacked rows a tile: with more, they alone would need most of the shared memory."""
MAX_REGISTERS = 128
"""Per thread, for four programs an SM: more programs are faster than no spills."""


@triton.jit
def _trizone_kernel(
    query_ptr, key_ptr, value_ptr, heads_ptr, halves_ptr, words_ptr, entries_ptr, items_ptr, scaled_ptr,
    undo_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr, scale_log2, stride_row,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, FIELDS: tl.constexpr, ITEM: tl.constexpr, HEAD_FIELDS: tl.constexpr,
    ALIGN: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
    slot = tl.program_id(0)
    item = items_ptr + slot * ITEM
    kind, source = tl.load(item), tl.load(item + 1)
    begin, end, bh = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    row = entries_ptr + source.to(tl.int64) * FIELDS
    scaled = scaled_ptr + source.to(tl.int64) * BLOCK_G * BLOCK_D
    undo = undo_ptr + source.to(tl.int64) * BLOCK_G
    if kind <= 3:
        packed_item(
            scaled, undo, halves_ptr, words_ptr, row, kind, begin, end, partial_ptr, lse_ptr, slot,
            G, BLOCK_G, 8 if G <= 8 else BLOCK_G, D, BLOCK_D, BLOCK_C, ASM,
        )  # fmt: skip
    elif kind == 4:
        rows_item(
            query_ptr, key_ptr, value_ptr, heads_ptr, bh, begin, end, stride_row, scale_log2, partial_ptr,
            lse_ptr, slot, G, BLOCK_G, D, BLOCK_D, BLOCK_R, HEAD_FIELDS, ALIGN, DOT,
        )  # fmt: skip
    if kind <= 4:
        combine_if_last(
            partial_ptr, lse_ptr, counter_ptr, out_ptr, bh, tl.load(item + 5), tl.load(item + 6),
            tl.arange(0, BLOCK_D), G, D,
        )  # fmt: skip


class TriZoneScratch(NamedTuple):
    """What the launches of a batch pass to one another.

    Attributes:
        scaled, undo: each entry's queries times a power of two, float16 `[entries, 16, D to a power of two]`,
            and what makes logits of their products, float32 `[entries, 16]`.
        splits: a slot for each item.
    """

    scaled: Tensor
    undo: Tensor
    splits: SplitWorkspace

    @classmethod
    def of(cls, output: Tensor, num_entries: int, num_items: int) -> TriZoneScratch:
        """Allocate a batch's scratch. Args: output `[..., G, D]`, a head for each (sequence, KV head)."""
        block_d, device = max(triton.next_power_of_2(output.shape[-1]), 16), output.device
        return cls(
            scaled=torch.empty(num_entries, MIN_BLOCK_G, block_d, dtype=torch.float16, device=device),
            undo=torch.empty(num_entries, MIN_BLOCK_G, dtype=torch.float32, device=device),
            splits=split_workspace(output, num_items),
        )


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
    scratch: TriZoneScratch,
    output: Tensor,
    new_keys: Tensor | None = None,
    new_values: Tensor | None = None,
) -> None:
    """Run one decode step of a batch over its packed prompts and new rows: a prologue and one launch.

    Args:
        queries: contiguous `[B, H_kv, G, D]`.
        keys, values: the buffers that `heads` counts from (the arena, or two), the queries' dtype.
        heads: int64 `[B * H_kv, F]`, the new rows; see `kernels/descriptors.py`.
        codes: uint8, the buffer that the work list's offsets count from; 16-byte aligned.
        scratch: for at least as many entries and items as the list has.
        output: out, contiguous `[B, H_kv, G, D]` in the queries' dtype; zero of a head without items, if
            there are entries.
        new_keys, new_values: contiguous `[B, H_kv, D]`, to be written to `keys` as row `length - 1` of each
            head that has a length; both None if the rows are written already. Rows are then D elements apart.
    """
    group_size, head_dim = queries.shape[2:]
    block_d = max(triton.next_power_of_2(head_dim), 16)
    usable = codes[: codes.numel() // 4 * 4]
    halves, words = usable.view(torch.float16), usable.view(torch.int16)
    scale_log2 = scaling * LOG2_E
    entries, splits = work.entries, scratch.splits
    shape = {"G": group_size, "BLOCK_G": MIN_BLOCK_G, "D": head_dim, "BLOCK_D": block_d}
    shape["FIELDS"] = ENTRY_FIELDS
    _prologue_kernel[(entries.shape[0],)](
        queries, words, entries, scratch.scaled, scratch.undo, output,
        queries if new_keys is None else new_keys, queries if new_values is None else new_values, keys, heads,
        scale_log2, heads.shape[0], **shape, HEAD_FIELDS=heads.shape[1], APPEND=new_keys is not None,
        num_warps=4 if block_d <= 128 else 8, num_stages=1, **dependent(queries.device),
    )  # fmt: skip
    _trizone_kernel[(work.items.shape[0],)](
        queries, keys, values, heads, halves, words, entries, work.items, scratch.scaled, scratch.undo,
        splits.partial, splits.lse, splits.counters, output, scale_log2, row_stride,
        **shape, BLOCK_C=min(BLOCK_CHANNELS, block_d), BLOCK_R=BLOCK_ROWS, ITEM=ITEM_FIELDS,
        HEAD_FIELDS=heads.shape[1], ALIGN=ALIGNMENT_BYTES // queries.element_size(),
        DOT=dot_dtype(queries.dtype), ASM=not interpreting(), num_warps=4 if block_d <= 128 else 8,
        num_stages=2, maxnreg=MAX_REGISTERS, **dependent(queries.device),
    )  # fmt: skip


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """Run one sequence of `trizone_decode_batch`; `__init__.py` checks arguments."""
    num_kv_heads = queries.shape[0]
    # layers without bytes still need a valid pointer
    codes = next((s.buffer for s in segments if s.buffer.numel()), queries.new_zeros(16, dtype=torch.uint8))
    programs = num_kv_heads * choose_num_splits(num_kv_heads, queries.device)
    work = work_list([segments], codes, row_splits=1, num_programs=programs).to(queries.device)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    trizone_decode_batch(
        queries.contiguous()[None],
        new_keys,
        new_values,
        uniform_heads(new_keys, new_values),
        codes,
        work,
        row_stride=new_keys.stride(1),
        scaling=scaling,
        scratch=TriZoneScratch.of(output, work.entries.shape[0], work.items.shape[0]),
        output=output[None],
    )
    return output
