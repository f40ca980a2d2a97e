"""The knapsack is never over budget, within its proven gap of the optimum, and its bound is below both."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.shared.compression.rdkv.allocation import are_usable, lower_hull, solve_knapsack
from kvferry.shared.compression.rdkv.epsilon import PAPER_TABLES, WIDTHS

CURVES = [c for table in PAPER_TABLES.values() for c in (table.key_curve, table.value_curve)]
WEIGHT = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))
# 2 bits that distort more than eviction, and 4 and 8 bits off the convex hull, as measurement may find them
ODD_CURVES = [(1.0, 1.7, 0.3, 0.01, 0.0), (1.0, 0.9, 0.85, 0.2, 0.0), (1.0, 0.1, 0.1, 0.1, 0.1)]


def brute_force(weights, curve, budget):
    allocations = itertools.product(range(len(WIDTHS)), repeat=len(weights))
    return min(
        math.fsum(w * curve[i] for w, i in zip(weights, chosen, strict=True))
        for chosen in allocations
        if sum(WIDTHS[i] for i in chosen) <= budget
    )


def exact_optimum(weights, curve, budget):
    """The plain dynamic programme over all units, for instances too large to enumerate."""
    best = [0.0] * (budget + 1)
    for w in weights:
        best = [
            min(best[s - width] + w * e for width, e in zip(WIDTHS, curve, strict=True) if width <= s)
            for s in range(budget + 1)
        ]
    return best[budget]


def solve(weights, curve, budget):
    return solve_knapsack(torch.tensor([weights], dtype=torch.float64), curve, torch.tensor([budget]))


def distortion(weights, curve, bits):
    """`sum_u w_u epsilon(b_u)` of each head, float64 `[H]`."""
    table = torch.zeros(17, dtype=torch.float64)
    table[list(WIDTHS)] = torch.tensor(curve, dtype=torch.float64)
    return (weights.double() * table[bits.long()]).sum(dim=1)


def first_gains_left(weights, curve, widths, bits):
    """lambda of each head: the largest gain per bit that the hull still has for a unit, float64 `[H]`."""
    hull = lower_hull(tuple(curve), tuple(widths))
    left = torch.tensor([*hull.gains, 0.0], dtype=torch.float64)
    taken = (bits.long()[:, :, None] >= torch.tensor(hull.widths)).sum(dim=2) - 1
    return (weights.double() * left[taken]).amax(dim=1)


def least_step_left(weights, curve, widths, bits):
    """The bits of the smallest next increment that gains something, over a head's units; None without one."""
    hull = lower_hull(tuple(curve), tuple(widths))
    following = dict(zip(hull.widths, hull.steps, strict=False))
    steps = [following.get(b) for w, b in zip(weights, bits[0].tolist(), strict=True) if w > 0]
    return min((step for step in steps if step is not None), default=None)


def lower_bounds(weights, curve, widths, bits, budgets):
    """The dual (Prop. A.3) at `first_gains_left`: `sum_u min_b [w_u epsilon(b) + lambda b] - lambda B`,
    float64 `[H]`. Every allocation within the budget has at least this distortion."""
    lam = first_gains_left(weights, curve, widths, bits)
    least = torch.stack(
        [weights.double() * curve[WIDTHS.index(width)] + (lam * width)[:, None] for width in widths]
    ).amin(dim=0)
    return (least.sum(dim=1) - lam * budgets).clamp(min=0)


def check(bits, weights, curve, budget, widths=WIDTHS):
    """Returns the distortion and its lower bound. Fewer bits are left than any increment has that gains
    something, so the gap to the bound is less than lambda times the largest (Prop. A.3)."""
    assert set(bits[0].tolist()) <= set(widths)
    assert int(bits.long().sum()) <= budget
    rows, budgets = torch.tensor([weights], dtype=torch.float64), torch.tensor([budget])
    lam, left = float(first_gains_left(rows, curve, widths, bits)), budget - int(bits.long().sum())
    value = float(distortion(rows, curve, bits))
    bound = float(lower_bounds(rows, curve, widths, bits, budgets))
    assert value - bound <= lam * max(widths) * (1 + 1e-9) + 1e-9 * max(weights)
    step = least_step_left(weights, curve, widths, bits)
    assert step is None or left < step
    assert step is not None or lam == 0
    assert 0 <= bound <= value * (1 + 1e-9) + 1e-12
    return value, bound


@given(
    weights=st.lists(WEIGHT, min_size=1, max_size=4),
    curve=st.sampled_from([*CURVES, *ODD_CURVES]),
    budget=st.integers(0, 70),
)
def test_the_bound_of_small_instances_is_below_brute_force(weights, curve, budget):
    value, bound = check(solve(weights, curve, budget), weights, curve, budget)
    optimum = brute_force(weights, curve, budget)
    assert optimum <= value * (1 + 1e-9)
    assert bound <= optimum * (1 + 1e-9) + 1e-12


@given(
    weights=st.lists(WEIGHT, min_size=1, max_size=5),
    curve=st.sampled_from([*CURVES, *ODD_CURVES]),
    widths=st.sampled_from([(2, 4, 8, 16), (0, 16), (0, 4, 16), (0, 2, 8), (4, 16), (8,)]),
    spare=st.integers(0, 60),
)
def test_the_bound_of_fewer_widths_is_below_brute_force(weights, curve, widths, spare):
    budget = widths[0] * len(weights) + spare
    solution = solve_knapsack(
        torch.tensor([weights], dtype=torch.float64), curve, torch.tensor([budget]), widths=widths
    )
    value, bound = check(solution, weights, curve, budget, widths)
    optimum = min(
        math.fsum(w * curve[WIDTHS.index(b)] for w, b in zip(weights, chosen, strict=True))
        for chosen in itertools.product(widths, repeat=len(weights))
        if sum(chosen) <= budget
    )
    assert optimum <= value * (1 + 1e-9)
    assert bound <= optimum * (1 + 1e-9) + 1e-12


@settings(max_examples=6)
@given(num_units=st.integers(250, 300), average=st.floats(0.3, 6), seed=st.integers(0, 999))
def test_instances_of_a_prompts_size_are_within_one_percent_of_the_optimum(num_units, average, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_units, generator=generator).mul(2).exp().double().tolist()
    budget = int(average * num_units)
    value, _ = check(solve(weights, CURVES[1], budget), weights, CURVES[1], budget)
    assert value <= exact_optimum(weights, CURVES[1], budget) * 1.01


@given(
    weights=st.lists(WEIGHT, min_size=1, max_size=150),
    curve=st.sampled_from([*CURVES, *ODD_CURVES]),
    budget=st.integers(0, 3000),
)
def test_no_allocation_is_over_budget_and_every_bound_holds(weights, curve, budget):
    check(solve(weights, curve, budget), weights, curve, budget)


@pytest.mark.parametrize("average", [0.1, 0.5, 2, 7.3])
def test_the_duality_gap_of_long_prompts_is_negligible(average):
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(3, 5000, generator=generator).mul(2).exp()
    budget = torch.full((3,), int(average * 5000))
    bits = solve_knapsack(weights, CURVES[1], budget)
    assert (bits.sum(dim=1) <= budget).all()
    value = distortion(weights, CURVES[1], bits)
    gap = (value - lower_bounds(weights, CURVES[1], WIDTHS, bits, budget)) / value
    assert float(gap.max()) < 1e-3


def test_equal_weights_use_the_budget_and_not_more():
    bits = solve([1.0] * 1000, CURVES[1], 1001)
    assert int(bits.sum()) == 1000
    value, bound = check(bits, [1.0] * 1000, CURVES[1], 1001)
    assert (value - bound) / value < 2e-3


def test_heads_are_solved_as_if_alone():
    generator = torch.Generator().manual_seed(6)
    weights = torch.rand(4, 90, generator=generator) ** 3
    budgets = torch.tensor([0, 31, 400, 9999])
    together = solve_knapsack(weights, CURVES[0], budgets)
    for h in range(4):
        alone = solve_knapsack(weights[h : h + 1], CURVES[0], budgets[h : h + 1])
        assert torch.equal(together[h], alone[0])
        assert int(together[h].long().sum()) <= int(budgets[h])
    assert together[0].eq(0).all()
    assert together[3].eq(16).all()


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_a_common_factor_of_the_weights_changes_nothing(factor):
    generator = torch.Generator().manual_seed(7)
    weights = torch.rand(2, 60, generator=generator, dtype=torch.float64)
    budgets = torch.tensor([100, 333])
    plain = solve_knapsack(weights, CURVES[0], budgets)
    scaled = solve_knapsack(weights * factor, CURVES[0], budgets)
    values = [distortion(weights, CURVES[0], bits) for bits in (plain, scaled)]
    torch.testing.assert_close(values[1], values[0], rtol=1e-9, atol=0)


def test_weights_of_zero_get_no_bits():
    assert solve([0.0, 1.0, 0.0], CURVES[0], 100).tolist() == [[0, 16, 0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_impossible_weights_are_not_usable(bad):
    usable = torch.tensor([[0.0, 1.0]])
    assert are_usable(usable, usable)
    assert not are_usable(torch.tensor([[1.0, bad]]), usable)
    assert not are_usable(usable, torch.tensor([[1.0, bad]]))
