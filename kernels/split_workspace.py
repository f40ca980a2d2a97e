"""Scratch memory of split decode kernels: partial results of every split, and a counter per head.

A decode kernel divides a head's rows into splits. Each writes a normalised partial output and its
log2-sum-exp here; the last to finish adds them up and resets the counter to zero. Allocated once and reused
by every layer and step (a captured step must not allocate); kernels on one stream may share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SPLITS = 64
"""Splits of one head at most; the last one reads all their parts in one tile."""
CTAS_PER_SM = 4
_INTERPRETED_SPLITS = 2


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


def split_workspace(
    *, num_heads: int, num_slots: int, group_size: int, head_dim: int, device: torch.device
) -> SplitWorkspace:
    """Args: num_heads: (sequence, KV head) pairs; num_slots: splits of all heads together."""
    return SplitWorkspace(
        partial=torch.empty(num_slots, group_size, head_dim, dtype=torch.float32, device=device),
        lse=torch.empty(num_slots, group_size, dtype=torch.float32, device=device),
        counters=torch.zeros(num_heads, dtype=torch.int32, device=device),
    )


def choose_num_splits(num_heads: int, device: torch.device) -> int:
    """Splits per head so that all heads together fill the device a few times; fixed for a batch bucket.

    Independent of lengths, which are read on the device: short heads leave their last splits idle.
    """
    if device.type != "cuda":
        return _INTERPRETED_SPLITS
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(max(-(-CTAS_PER_SM * num_sms // num_heads), 1), MAX_SPLITS)
