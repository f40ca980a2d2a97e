"""Hybrid sparse attention in Triton: append and score pages, select tokens, attend to them; three launches.

    page_scores.py      _score_pages_kernel
    token_selection.py  _select_tokens_kernel
    gather_attend.py    _gather_attend_kernel

Descriptors (`ROW_FIELDS`, then those of `hsa.descriptors`) locate rows and page extremes, so sequences with
any page sizes, budgets and lengths share a launch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import (
    MAX_REGISTERS,
    MIN_SPLIT_BYTES,
    block_tokens,
    decode_warps,
    dot_dtype,
)
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.hsa.descriptors import BLOCK_PAGES, FIELDS, HsaScratch, PageSizes, hsa_scratch
from kvferry.kernels.hsa.gather_attend import _gather_attend_kernel
from kvferry.kernels.hsa.page_scores import _score_pages_kernel, _score_rows_kernel
from kvferry.kernels.hsa.token_selection import _select_tokens_kernel
from kvferry.kernels.split_attention import LOG2_E, MIN_BLOCK_G
from kvferry.kernels.split_workspace import choose_num_splits


def append_and_attend_batch(
    queries: Tensor,
    arena: Tensor,
    heads: Tensor,
    *,
    max_channels: int,
    page_sizes: PageSizes,
    scaling: float,
    scratch: HsaScratch,
    num_splits: int,
    output: Tensor,
    new_keys: Tensor | None = None,
    new_values: Tensor | None = None,
) -> None:
    """Append one row to every sequence of a batch, if given, and attend as `hsa.attend` does.

    Args:
        queries: contiguous `[B, H_kv, G, D]`.
        arena: the buffer that offsets count from, in the queries' dtype; rows are D elements apart.
        heads: int64 `[B * H_kv, FIELDS]`; lengths include the new row. A head of length 0 has an output of 0.
        max_channels: the largest k1 of the batch.
        page_sizes: which there are among the heads.
        scratch: for at least B * H_kv heads; its `max_pages` is at most MAX_PAGES, and its `max_tokens` at
            least the largest min(k2, length).
        new_keys, new_values: contiguous `[B, H_kv, D]`, or both None if the rows are written already.
        output: out, contiguous `[B, H_kv, G, D]`.
    """
    score_pages(
        queries,
        arena,
        heads,
        max_channels=max_channels,
        page_sizes=page_sizes,
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
    page_sizes: PageSizes,
    scratch: HsaScratch,
    new_keys: Tensor | None,
    new_values: Tensor | None,
) -> None:
    """The first launch of `append_and_attend_batch`, or two if page sizes are both 1 and larger."""
    group_size, head_dim = queries.shape[2:]
    max_pages, num_blocks = scratch.scores.shape[2], scratch.partial.shape[1]
    block_k1 = max(triton.next_power_of_2(max_channels), 16)
    arguments = (
        queries, arena, queries if new_keys is None else new_keys,
        queries if new_values is None else new_values, heads, scratch.scores, scratch.partial, max_pages,
    )  # fmt: skip
    constants = {
        "G": group_size, "BLOCK_G": MIN_BLOCK_G, "D": head_dim, "BLOCK_D": _block_d(head_dim),
        "BLOCK_P": BLOCK_PAGES, "APPEND": new_keys is not None, "FIELDS": FIELDS,
        "ALIGN": ALIGNMENT_BYTES // queries.element_size(), "DOT": dot_dtype(queries.dtype), "num_stages": 1,
    }  # fmt: skip
    grid = (heads.shape[0], num_blocks)
    if page_sizes.more:
        num_warps = 8 if block_k1 <= 128 else 16
        _score_pages_kernel[grid](*arguments, **constants, BLOCK_K1=block_k1, num_warps=num_warps)
    if page_sizes.one:
        _score_rows_kernel[grid](*arguments, **constants, num_warps=8)


def select_tokens(heads: Tensor, scratch: HsaScratch, *, group_size: int) -> None:
    """The second launch of `append_and_attend_batch`: `scratch.tokens` and `counts` from its scores."""
    max_pages, num_blocks = scratch.scores.shape[2], scratch.partial.shape[1]
    block_p = max(triton.next_power_of_2(max_pages), 128)
    _select_tokens_kernel[(heads.shape[0],)](
        scratch.scores, scratch.partial, heads, scratch.tokens, scratch.counts, max_pages, num_blocks,
        BLOCK_PAGES, scratch.tokens.shape[1],
        G=group_size, BLOCK_P=block_p, BLOCK_B=triton.next_power_of_2(num_blocks), FIELDS=FIELDS,
        # registers for at most 16 pages per thread
        num_warps=8 if block_p <= 2048 else 16, num_stages=1,
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
        num_warps=decode_warps(block_d), num_stages=3, maxnreg=MAX_REGISTERS,
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
    """One sequence of `append_and_attend_batch`; `__init__.py` checks arguments.

    Args: new_key, new_value `[H_kv, D]`: row `length - 1`, or both None if it is written already.
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
        page_sizes=PageSizes.of([page_size]),
        scaling=scaling,
        scratch=scratch,
        num_splits=splits,
        output=output[None],
        new_keys=None if new_key is None else new_key.contiguous(),
        new_values=None if new_value is None else new_value.contiguous(),
    )
    return output


def _distance(base: Tensor, tensor: Tensor) -> int:
    """Elements from the start of one tensor to the start of another, which may be in another storage."""
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()
