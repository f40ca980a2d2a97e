"""The knapsack's kernel takes what the plain loop over increments takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvferry.kernels.knapsack import NEAR, take_increments


def plainly(order: Tensor, gained: Tensor, steps: list[int], budgets: list[int], num_units: int) -> Tensor:
    """One head and one increment after another."""
    bits = torch.zeros(len(order), num_units, dtype=torch.int64)
    before = [sum(steps[:step]) for step in range(len(steps))]
    for head, budget in enumerate(budgets):
        left, missed = budget, 0
        for number, gain in zip(order[head].tolist(), gained[head].tolist(), strict=True):
            step, unit = divmod(number, num_units)
            fits = gain > 0 and steps[step] <= left and int(bits[head, unit]) == before[step]
            if missed and fits:
                bits[head, unit] += steps[step]
                break
            if fits and not missed:
                bits[head, unit] += steps[step]
                left -= steps[step]
                continue
            missed += 1
            if missed > NEAR - 1:
                break
    return bits


@pytest.mark.parametrize("num_units", [1, 7, 600, 1500])
@pytest.mark.usefixtures("interpreter")
def test_increments_are_those_of_a_plain_loop(num_units: int) -> None:
    generator = torch.Generator().manual_seed(num_units)
    steps, gains = [2, 2, 4, 8], torch.tensor([3.0, 1.0, 0.3, 0.1], dtype=torch.float64)
    # equal weights, and weights of nothing
    weights = (
        (torch.rand(4, num_units, dtype=torch.float64, generator=generator) * 9 - 1).clamp(min=0).floor()
    )
    gained, order = (weights[:, None] * gains[:, None]).flatten(1).sort(dim=1, descending=True, stable=True)
    budgets = [0, 5, 3 * num_units + 1, 17 * num_units]
    taken = take_increments(order, gained, torch.tensor(steps), torch.tensor(budgets), num_units=num_units)
    assert torch.equal(taken, plainly(order, gained, steps, budgets, num_units))
