"""The knapsack is never over budget, within 1 % of a brute-force optimum, and its bound is below both."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.shared.compression.rdkv.epsilon import PAPER_TABLES, WIDTHS
from kvferry.shared.compression.rdkv.knapsack import CORE_UNITS, solve_knapsack
from kvferry.shared.errors import KvferryError

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


def check(solution, weights, curve, budget):
    bits = solution.bits[0].tolist()
    assert set(bits) <= set(WIDTHS)
    assert sum(bits) <= budget
    value = math.fsum(w * curve[WIDTHS.index(b)] for w, b in zip(weights, bits, strict=True))
    assert float(solution.distortion[0]) == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert 0 <= float(solution.lower_bound[0]) <= value * (1 + 1e-9) + 1e-12
    return value


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(WEIGHT, min_size=1, max_size=4),
    curve=st.sampled_from([*CURVES, *ODD_CURVES]),
    budget=st.integers(0, 70),
)
def test_small_instances_are_within_one_percent_of_brute_force(weights, curve, budget):
    solution = solve(weights, curve, budget)
    value = check(solution, weights, curve, budget)
    optimum = brute_force(weights, curve, budget)
    assert value <= optimum * 1.01 + 1e-12
    assert float(solution.lower_bound[0]) <= optimum * (1 + 1e-9) + 1e-12


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(WEIGHT, min_size=1, max_size=5),
    curve=st.sampled_from([*CURVES, *ODD_CURVES]),
    widths=st.sampled_from([(2, 4, 8, 16), (0, 16), (0, 4, 16), (0, 2, 8), (4, 16), (8,)]),
    spare=st.integers(0, 60),
)
def test_instances_of_fewer_widths_are_within_one_percent_of_brute_force(weights, curve, widths, spare):
    budget = widths[0] * len(weights) + spare
    solution = solve_knapsack(
        torch.tensor([weights], dtype=torch.float64), curve, torch.tensor([budget]), widths=widths
    )
    bits = solution.bits[0].tolist()
    assert set(bits) <= set(widths)
    assert sum(bits) <= budget
    optimum = min(
        math.fsum(w * curve[WIDTHS.index(b)] for w, b in zip(weights, chosen, strict=True))
        for chosen in itertools.product(widths, repeat=len(weights))
        if sum(chosen) <= budget
    )
    assert float(solution.distortion[0]) <= optimum * 1.01 + 1e-12
    assert float(solution.lower_bound[0]) <= optimum * (1 + 1e-9) + 1e-12


@settings(max_examples=15, deadline=None)
@given(num_units=st.integers(CORE_UNITS + 1, 70), average=st.floats(0.3, 6), seed=st.integers(0, 999))
def test_instances_beyond_the_core_are_within_one_percent_of_the_optimum(num_units, average, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_units, generator=generator).mul(2).exp().double().tolist()
    budget = int(average * num_units)
    value = check(solve(weights, CURVES[1], budget), weights, CURVES[1], budget)
    assert value <= exact_optimum(weights, CURVES[1], budget) * 1.01


@settings(max_examples=40, deadline=None)
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
    solution = solve_knapsack(weights, CURVES[1], budget)
    assert (solution.bits.sum(dim=1) <= budget).all()
    gap = (solution.distortion - solution.lower_bound) / solution.distortion
    assert float(gap.max()) < 1e-3


def test_equal_weights_use_the_budget_and_not_more():
    solution = solve_knapsack(torch.ones(1, 1000), CURVES[1], torch.tensor([1001]))
    assert int(solution.bits.sum()) == 1000
    gap = (solution.distortion - solution.lower_bound) / solution.distortion
    assert float(gap) < 2e-3


def test_heads_are_solved_as_if_alone():
    generator = torch.Generator().manual_seed(6)
    weights = torch.rand(4, 90, generator=generator) ** 3
    budgets = torch.tensor([0, 31, 400, 9999])
    together = solve_knapsack(weights, CURVES[0], budgets)
    for h in range(4):
        alone = solve_knapsack(weights[h : h + 1], CURVES[0], budgets[h : h + 1])
        torch.testing.assert_close(together.distortion[h], alone.distortion[0], rtol=1e-12, atol=0)
        assert int(together.bits[h].long().sum()) <= int(budgets[h])
    assert together.bits[0].eq(0).all()
    assert together.bits[3].eq(16).all()
    assert float(together.lower_bound[3]) == 0


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_a_common_factor_of_the_weights_changes_nothing(factor):
    generator = torch.Generator().manual_seed(7)
    weights = torch.rand(2, 60, generator=generator, dtype=torch.float64)
    budgets = torch.tensor([100, 333])
    plain = solve_knapsack(weights, CURVES[0], budgets)
    scaled = solve_knapsack(weights * factor, CURVES[0], budgets)
    torch.testing.assert_close(scaled.distortion / factor, plain.distortion, rtol=1e-9, atol=0)


def test_weights_of_zero_get_no_bits():
    solution = solve([0.0, 1.0, 0.0], CURVES[0], 100)
    assert solution.bits.tolist() == [[0, 16, 0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_impossible_weights_are_refused(bad):
    with pytest.raises(KvferryError, match="finite"):
        solve([1.0, bad], CURVES[0], 10)
