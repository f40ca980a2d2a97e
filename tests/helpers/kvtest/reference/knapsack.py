"""The knapsack's definition, one head and one increment after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take_increments(
    order: Tensor, gained: Tensor, costs: Sequence[int], budgets: Sequence[int], num_units: int
) -> Tensor:
    """An increment is taken if it gains something, fits what is left, and its unit has all before it.

    Args, returns: as of `kernels.knapsack.take_increments`.
    """
    levels = torch.zeros(len(order), num_units, dtype=torch.int64)
    for head, left in enumerate(budgets):
        for number, gain in zip(order[head].tolist(), gained[head].tolist(), strict=True):
            step, unit = divmod(number, num_units)
            if gain > 0 and costs[step] <= left and levels[head, unit] == step:
                levels[head, unit] += 1
                left -= costs[step]
    return levels
