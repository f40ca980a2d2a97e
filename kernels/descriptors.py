"""Descriptors: where each (sequence, KV head) of a batch has its rows, as one int64 table on the device.

A decode kernel is launched once for a batch; row `b * H_kv + h` of the table tells it everything about KV
head h of sequence b, so sequences of any length, and heads of unequal lengths, share one launch, and a
captured step finds new lengths in the same memory. Offsets count elements from the start of the buffer that
the launch is given (one for all sequences: the arena), and are multiples of 16 bytes.

Paged growth: with a page table, row r of a head lies at `offset + table[sequence, r // page_rows] +
(r % page_rows) * row_stride`; without one, at `offset + r * row_stride`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KEY_OFFSET, VALUE_OFFSET, LENGTH = range(3)
"""Columns that every table begins with: first K row, first V row, rows in use."""
ROW_FIELDS = 3
ALIGNMENT_BYTES = 16
MAX_GROUP_SIZE = 16
MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def uniform_heads(
    *, key_stride: int, value_stride: int, lengths: Sequence[int], device: torch.device
) -> Tensor:
    """A table of heads that lie at equal distances from two buffers' starts.

    Args: key_stride, value_stride: elements from one head to the next; lengths: rows in use, one a head.
    Returns: int64 `[heads, ROW_FIELDS]`.
    """
    rows = [(h * key_stride, h * value_stride, length) for h, length in enumerate(lengths)]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def shape_problem(dtype: torch.dtype, group_size: int, head_dim: int) -> str | None:
    """Why no decode kernel serves such queries, None where they do."""
    if dtype not in DTYPES:
        return f"dtype is {dtype}; it must be one of {', '.join(str(d) for d in DTYPES)}"
    if group_size > MAX_GROUP_SIZE:
        return f"there are {group_size} query heads a KV head; there must be at most {MAX_GROUP_SIZE}"
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim is {head_dim}; it must be a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


def alignment_problem(**tensors: Tensor) -> str | None:
    """Why rows of these `[H, n, D]` tensors cannot be read 16 bytes at a time, None where they can."""
    for name, tensor in tensors.items():
        strides = [s for size, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        size = tensor.element_size()
        if tensor.stride(-1) != 1 or any(s * size % ALIGNMENT_BYTES for s in strides):
            return (
                f"{name} has strides {tensor.stride()}; rows must start at multiples of "
                f"{ALIGNMENT_BYTES} bytes"
            )
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            return f"{name} does not start at a multiple of {ALIGNMENT_BYTES} bytes"
    return None
