"""Both paths of the knapsack take what a plain loop over the increments takes."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.knapsack import take_increments as plainly
from torch import Tensor

from kvferry.kernels.knapsack import take_increments, take_increments_torch


def ordered(weights: Tensor, gains: list[float]) -> tuple[Tensor, Tensor]:
    """Increments as the knapsack orders them: gains and numbers."""
    weighed = weights[:, None] * torch.tensor(gains, dtype=torch.float64)[:, None]
    gained, order = weighed.flatten(1).sort(dim=1, descending=True, stable=True)
    return order, gained


def check(
    order: Tensor, gained: Tensor, costs: tuple[int, ...], budgets: list[int], num_units: int
) -> Tensor:
    expected = plainly(order, gained, costs, budgets, num_units)
    limits = torch.tensor(budgets)
    in_torch = take_increments_torch(order, gained, costs, limits, num_units)
    assert torch.equal(in_torch, expected)
    assert torch.equal(take_increments(order, gained, costs, limits, num_units=num_units), expected)
    return expected


@pytest.mark.parametrize("num_units", [1, 7, 600, 1500])
@pytest.mark.parametrize("costs", [(2, 2, 4, 8), (160, 128, 256, 480), (5, 4, 8, 15), (1, 90), (7,)], ids=str)
@pytest.mark.usefixtures("interpreter")
def test_increments_are_those_of_a_plain_loop(costs: tuple[int, ...], num_units: int) -> None:
    generator = torch.Generator().manual_seed(num_units)
    # equal weights, and weights of nothing
    weights = (
        (torch.rand(6, num_units, dtype=torch.float64, generator=generator) * 9 - 1).clamp(min=0).floor()
    )
    order, gained = ordered(weights, [3.0, 1.0, 0.3, 0.1][: len(costs)])
    most = sum(costs) * num_units
    budgets = [0, max(costs) + 1, most // 5 + 1, most // 3, most - 1, most + 1]
    levels = check(order, gained, costs, budgets, num_units)
    spent = torch.tensor([0, *costs]).cumsum(0)[levels].sum(1)
    assert (spent <= torch.tensor(budgets)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("interpreter")
def test_what_is_left_is_filled_by_several_increments(seed: int) -> None:
    """One of a hundred leaves up to 99, and each of the cheap ones after it takes a few."""
    generator = torch.Generator().manual_seed(seed)
    order, gained = ordered(torch.rand(8, 41, dtype=torch.float64, generator=generator), [1.0, 0.5, 0.4])
    budgets = (torch.arange(8) * 137 + 60).tolist()
    levels = check(order, gained, (100, 7, 3), budgets, 41)
    assert (levels == 3).any()


@pytest.mark.parametrize("num_between", [63, 64, 1022, 1023, 1024, 2500])
@pytest.mark.usefixtures("interpreter")
def test_one_that_fits_is_found_behind_any_number_that_do_not(num_between: int) -> None:
    # unit 0 comes first, three others fit, and unit 0's second increment is the last that gains something
    weights = torch.ones(1, 4 + num_between, dtype=torch.float64)
    weights[0, 0] = 100.0
    order, gained = ordered(weights, [1.0, 0.001])
    levels = check(order, gained, (10, 3), [45], 4 + num_between)
    assert levels[0, :5].tolist() == [2, 1, 1, 1, 0]
    assert not levels[0, 4:].any()


@pytest.mark.usefixtures("interpreter")
def test_an_increment_whose_predecessor_did_not_fit_is_not_taken() -> None:
    order, gained = ordered(torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64), [1.0, 0.9])
    # unit 0 takes 12; the 2 that are left would pay for the second increment of another
    assert check(order, gained, (10, 2), [14], 3).tolist() == [[2, 0, 0]]


@pytest.mark.usefixtures("interpreter")
def test_nothing_is_taken_for_no_gain() -> None:
    order, gained = ordered(torch.zeros(2, 5, dtype=torch.float64), [1.0, 0.5])
    assert not check(order, gained, (2, 3), [0, 1000], 5).any()


@pytest.mark.parametrize(("num_units", "costs"), [(0, (2, 3)), (4, ())])
def test_without_increments_no_unit_has_any(num_units: int, costs: tuple[int, ...]) -> None:
    order = torch.zeros(2, 0, dtype=torch.int64)
    levels = take_increments(order, order.double(), costs, torch.tensor([3, 4]), num_units=num_units)
    assert levels.shape == (2, num_units)
    assert not levels.any()
