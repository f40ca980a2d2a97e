"""Hybrid sparse attention in Triton: append and score pages, select tokens, attend to them; three launches.

    page_scores.py      _score_pages_kernel, _score_rows_kernel
    token_selection.py  _select_tokens_kernel, _gather_attend_kernel

Descriptors (`ROW_FIELDS`, then those of `hsa.batch`) locate rows and page extremes, so sequences with
any page sizes, budgets and lengths share a launch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import (
    MAX_REGISTERS,
    MIN_SPLIT_BYTES,
    MORE_REGISTERS,
    MOST_REGISTERS,
    block_tokens,
    decode_warps,
    dot_dtype,
)
from kvferry.kernels.dependent_launch import dependent
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.hsa.batch import (
    BLOCK_PAGES,
    BLOCKS_A_PROGRAM,
    FIELDS,
    HsaScratch,
    SparseRows,
    SparseSize,
    sparse_fields,
)
from kvferry.kernels.hsa.page_scores import _score_pages_kernel, _score_rows_kernel
from kvferry.kernels.hsa.token_selection import _gather_attend_kernel, _select_tokens_kernel
from kvferry.kernels.softmax import Scaling, as_softmax, scale_of
from kvferry.kernels.split_attention import LOG2_E, MIN_BLOCK_G

WARP_SIZE = 32
SCORES_A_THREAD = 32
"""The most scores of pages, of several query heads, that a selecting thread loads at once."""
TOKENS_A_THREAD = 4
"""Tokens that a selecting thread writes at once."""


def append_and_attend_batch(
    queries: Tensor,
    arena: Tensor,
    heads: Tensor,
    scratch: HsaScratch,
    *,
    scaling: Scaling,
    output: Tensor,
    new_keys: Tensor | None = None,
    new_values: Tensor | None = None,
) -> None:
    """Append one row to every sequence of a batch, if given, and attend as `hsa.attend` does.

    Args:
        queries: contiguous `[B, H_kv, G, D]`.
        arena: the buffer that offsets count from, in the queries' dtype; rows are D elements apart.
        heads: int64 `[B * H_kv, FIELDS]`; lengths include the new row. A head of length 0 has an output of 0.
        scratch: for at least B * H_kv heads; its `max_pages` is at most MAX_PAGES.
        new_keys, new_values: contiguous `[B, H_kv, D]`, or both None if the rows are written already.
        output: out, contiguous `[B, H_kv, G, D]`.
    """
    new = {"new_keys": new_keys, "new_values": new_values}
    score_pages(queries, arena, heads, scratch, scaling=scale_of(scaling), **new)
    select_tokens(heads, scratch)
    attend_selected(queries, arena, heads, scratch, scaling=scaling, output=output)


def score_pages(
    queries: Tensor,
    arena: Tensor,
    heads: Tensor,
    scratch: HsaScratch,
    *,
    scaling: float,
    new_keys: Tensor | None,
    new_values: Tensor | None,
) -> None:
    """Run the first launch of `append_and_attend_batch`; two if page sizes are both 1 and larger.

    On an H200 eight warps take 1.4 times as long as four for a batch of eight, and as long for one and for 64
    (benchmarks/results/gpu/2026-11-27/call-4).
    """
    group_size, head_dim = queries.shape[2:]
    max_pages, num_blocks = scratch.scores.shape[2], scratch.partial.shape[1]
    block_k1 = max(triton.next_power_of_2(scratch.size.max_channels), 16)
    arguments = (
        queries, arena, queries if new_keys is None else new_keys,
        queries if new_values is None else new_values, heads, scratch.scores, scratch.partial, max_pages,
        scaling * LOG2_E,
    )  # fmt: skip
    constants = {
        "G": group_size, "BLOCK_G": MIN_BLOCK_G, "D": head_dim, "BLOCK_D": _block_d(head_dim),
        "BLOCK_P": BLOCK_PAGES, "APPEND": new_keys is not None, "FIELDS": FIELDS,
        "ALIGN": ALIGNMENT_BYTES // queries.element_size(), "DOT": dot_dtype(queries.dtype), "num_stages": 1,
        **dependent(queries.device),
    }  # fmt: skip
    programs = max(min(num_blocks, scratch.num_scoring), -(-num_blocks // BLOCKS_A_PROGRAM))
    grid = (heads.shape[0], programs)
    if scratch.size.larger_pages:
        num_warps, maxnreg = (4, MOST_REGISTERS) if block_k1 <= 128 else (16, MAX_REGISTERS)
        _score_pages_kernel[grid](
            *arguments, **constants, BLOCK_K1=block_k1, num_warps=num_warps, maxnreg=maxnreg
        )
    if scratch.size.pages_of_one:
        _score_rows_kernel[grid](*arguments, **constants, num_warps=8)


def select_tokens(heads: Tensor, scratch: HsaScratch) -> None:
    """Run the second launch of `append_and_attend_batch`: `scratch.tokens` and `counts` from the scores."""
    max_pages, num_blocks = scratch.scores.shape[2], scratch.partial.shape[1]
    group_size = scratch.scores.shape[1]
    block_p = max(triton.next_power_of_2(max_pages), 128)
    num_warps = selecting_warps(block_p)
    at_once = max(SCORES_A_THREAD * WARP_SIZE * num_warps // block_p, 1)
    _select_tokens_kernel[(heads.shape[0],)](
        scratch.scores, scratch.partial, heads, scratch.tokens, scratch.counts, max_pages, num_blocks,
        BLOCK_PAGES, scratch.tokens.shape[1],
        G=group_size, HEADS=min(triton.next_power_of_2(group_size), at_once), BLOCK_P=block_p,
        BLOCK_B=triton.next_power_of_2(num_blocks), BLOCK_T=TOKENS_A_THREAD * WARP_SIZE * num_warps,
        FIELDS=FIELDS, **dependent(heads.device), num_warps=num_warps, num_stages=1,
    )  # fmt: skip


def selecting_warps(block_p: int) -> int:
    """Return the warps that select from `block_p` pages: few, because they wait for one another, with
    registers for 16 pages a thread."""
    return min(max(block_p // (16 * WARP_SIZE), 4), 16)


def attend_selected(
    queries: Tensor, arena: Tensor, heads: Tensor, scratch: HsaScratch, *, scaling: Scaling, output: Tensor
) -> None:
    """Run the third launch of `append_and_attend_batch`: exact attention to `scratch.tokens`."""
    group_size, head_dim = queries.shape[2:]
    block_d = _block_d(head_dim)
    block_n = block_tokens(queries, block_d)
    softmax = as_softmax(scaling)
    _gather_attend_kernel[(heads.shape[0], scratch.num_splits)](
        queries, arena, heads, scratch.tokens, scratch.counts,
        queries if softmax.sinks is None else softmax.sinks, scratch.splits.partial, scratch.splits.lse,
        scratch.splits.counters, output, softmax.scaling * LOG2_E, softmax.softcap * LOG2_E,
        scratch.tokens.shape[1], queries.shape[1],
        G=group_size, BLOCK_G=MIN_BLOCK_G, D=head_dim, BLOCK_D=block_d, BLOCK_N=block_n,
        MIN_TILES=max(MIN_SPLIT_BYTES // (2 * block_n * head_dim * queries.element_size()), 1),
        FIELDS=FIELDS, ALIGN=ALIGNMENT_BYTES // queries.element_size(), DOT=dot_dtype(queries.dtype),
        CAPPED=softmax.softcap > 0, SINKS=softmax.sinks is not None, **dependent(queries.device),
        num_warps=decode_warps(block_d), num_stages=3,
        maxnreg=MORE_REGISTERS if block_d == 128 else MAX_REGISTERS,
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
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: Scaling,
) -> Tensor:
    """Run one sequence of `append_and_attend_batch`, all its rows written; `__init__.py` checks arguments."""
    rows = SparseRows(
        keys=keys,
        values=values,
        length=keys.shape[1] - 1,
        page_max=page_max,
        page_min=page_min,
        page_size=page_size,
        num_channels=num_channels,
        num_tokens=num_tokens,
    )
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    scratch = HsaScratch.of(SparseSize.of(rows), output)
    first, step = (torch.tensor(fields) for fields in sparse_fields(keys, rows))
    table = first + torch.arange(queries.shape[0])[:, None] * step
    append_and_attend_batch(
        queries.contiguous()[None],
        keys,
        table.to(queries.device, non_blocking=True),
        scratch,
        scaling=scaling,
        output=output[None],
    )
    return output
