"""Descriptors: where each (sequence, KV head) of a batch has its rows, as one int64 table on the device.

A decode kernel is launched once for a batch. Row `b * H_kv + h` of the table describes KV head h of sequence
b, so sequences and heads of any lengths share one launch, and a captured step finds new lengths in the same
memory. Offsets count elements from the start of the launch's buffer (one for all sequences: the arena), and
are multiples of 16 bytes.

With a page table, row r of a head is at `offset + table[sequence, r // page_rows] + (r % page_rows) *
row_stride`; without one, at `offset + r * row_stride`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KEY_OFFSET, VALUE_OFFSET, LENGTH = range(3)
"""The first columns of every table: first K row, first V row, rows in use."""
ROW_FIELDS = 3
ALIGNMENT_BYTES = 16
"""K and V rows start at multiples of this, so that kernels can load 16 bytes at a time."""


def uniform_heads(
    *, key_stride: int, value_stride: int, lengths: Sequence[int], device: torch.device
) -> Tensor:
    """A table of evenly spaced heads in two buffers.

    Args: key_stride, value_stride: elements from one head to the next; lengths: rows in use of each head.
    Returns: int64 `[heads, ROW_FIELDS]`.
    """
    rows = [(h * key_stride, h * value_stride, length) for h, length in enumerate(lengths)]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
