"""Descriptors by which a batched decode kernel finds its rows, and the scratch memory of split attention.

Descriptors: where each (sequence, KV head) of a batch has its rows, as one int64 table on the device.

A decode kernel is launched once for a batch. Row `b * H_kv + h` of the table describes KV head h of sequence
b, so sequences and heads of any lengths share one launch, and a captured step finds new lengths in the same
memory. Offsets count elements from the start of the launch's buffer (one for all sequences: the arena), and
are multiples of 16 bytes.

Row r of a head is at `offset + r * row_stride`.

Splits: a decode kernel divides a head's rows into splits. Each writes a normalised partial output and its
log2-sum-exp to a workspace; the last to finish adds them up and resets the head's counter to zero. Allocated
once and reused by every layer and step (a captured step must not allocate); kernels on one stream may share
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.device_limits import num_multiprocessors

KEY_OFFSET, VALUE_OFFSET, LENGTH = range(3)
"""The first columns of every table: first K row, first V row, rows in use."""
ROW_FIELDS = 3
WINDOW, ROWS_BEFORE = range(ROW_FIELDS, ROW_FIELDS + 2)
"""Two more columns of layers with a window: W, and the tokens before the first row in layers with chunks of W
tokens, -1 in layers with a sliding window. Rows before the window are not read."""
WINDOW_FIELDS = ROW_FIELDS + 2
ALIGNMENT_BYTES = 16
"""K and V rows start at multiples of this, so that kernels can load 16 bytes at a time."""
MAX_SPLITS = 64
"""Splits of one head at most; the last one reads all their parts in one tile."""
CTAS_PER_SM = 4
_INTERPRETED_SPLITS = 2


def uniform_heads(keys: Tensor, values: Tensor) -> Tensor:
    """Make a table of the heads of one sequence's K and V `[H_kv, n, D]`, each counted from its own start.

    Returns: int64 `[H_kv, ROW_FIELDS]`.
    """
    num_kv_heads, length, _ = keys.shape
    rows = [(h * keys.stride(0), h * values.stride(0), length) for h in range(num_kv_heads)]
    return torch.tensor(rows, dtype=torch.int64).to(keys.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class SplitWorkspace:
    """Scratch of one shape.

    Attributes:
        partial: float32 `[slots, G, D]`, normalised outputs of splits.
        lse: float32 `[slots, G]`, log2 of the splits' softmax denominators, -inf for a split without rows.
        counters: int32 `[heads]`, splits done; zero between launches.
    """

    partial: Tensor
    lse: Tensor
    counters: Tensor


def split_workspace(output: Tensor, num_slots: int) -> SplitWorkspace:
    """Allocate the scratch for one shape of output.

    Args: output `[..., G, D]`, a head for each (sequence, KV head); num_slots: splits of all heads together.
    """
    *heads, group_size, head_dim = output.shape
    new = partial(torch.empty, dtype=torch.float32, device=output.device)
    return SplitWorkspace(
        partial=new(num_slots, group_size, head_dim),
        lse=new(num_slots, group_size),
        counters=torch.zeros(math.prod(heads), dtype=torch.int32, device=output.device),
    )


def choose_num_programs(num_heads: int, device: torch.device) -> int:
    """Choose the programs of a launch, which are divided among heads by length; fixed for a batch bucket.

    One for each head, because every head needs one, and as many as fill the device a few times.
    """
    if device.type != "cuda":
        return (_INTERPRETED_SPLITS + 1) * num_heads
    return num_heads + programs_at_once(device)


def programs_at_once(device: torch.device) -> int:
    """Return how many programs of four warps run at the same time."""
    if device.type != "cuda":
        return 8 * _INTERPRETED_SPLITS
    return CTAS_PER_SM * num_multiprocessors(device)


def choose_num_splits(num_heads: int, device: torch.device) -> int:
    """Choose the splits per head so that all heads together fill the device; fixed for a batch bucket.

    Independent of lengths, which are read on the device: short heads leave their last splits idle.
    """
    if device.type != "cuda":
        return _INTERPRETED_SPLITS
    return min(max(-(-programs_at_once(device) // num_heads), 1), MAX_SPLITS)


def splits_at_once(num_heads: int, device: torch.device, per_multiprocessor: int) -> int:
    """Return as many splits per head as run at the same time: a few more would take twice as long."""
    if device.type != "cuda":
        return _INTERPRETED_SPLITS
    return min(max(per_multiprocessor * num_multiprocessors(device) // num_heads, 1), MAX_SPLITS)
