"""Writes one new K and V row for every (sequence, KV head) of a batch, at its descriptor's place; one launch.

A building block of the Triton paths of `dense_decode` and `trizone` (`hsa` appends as it scores); imported
only by them, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _append_rows_kernel(
    key_ptr, value_ptr, buffer_ptr, heads_ptr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    entry = heads_ptr + bh * FIELDS
    length = tl.load(entry + 2)
    d = tl.arange(0, BLOCK_D)
    mask = (d < D) & (length > 0)
    row = (length - 1) * D + d
    key = tl.load(key_ptr + bh * D + d, mask=mask, other=0.0)
    value = tl.load(value_ptr + bh * D + d, mask=mask, other=0.0)
    tl.store(buffer_ptr + tl.load(entry) + row, key, mask=mask)
    tl.store(buffer_ptr + tl.load(entry + 1) + row, value, mask=mask)


def append_rows(buffer: Tensor, heads: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write row `length - 1` of every head that has a length.

    Args:
        buffer: the buffer that offsets count from, in the rows' dtype; rows are D elements apart.
        heads: int64 `[B * H_kv, F]`, see `descriptors.py`; lengths include the new row.
        keys, values: contiguous `[B, H_kv, D]`.
    """
    head_dim = keys.shape[2]
    _append_rows_kernel[(heads.shape[0],)](
        keys, values, buffer, heads,
        D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), FIELDS=heads.shape[1], num_warps=1,
    )  # fmt: skip
