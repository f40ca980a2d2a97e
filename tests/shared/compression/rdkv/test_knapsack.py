"""The knapsack is never over budget, fills it, and is within its proven gap of the optimum."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtest.reference import knapsack as reference

from kvferry.shared.compression.rdkv.allocation import are_usable, lower_hull, row_costs, solve_knapsack
from kvferry.shared.compression.rdkv.epsilon import PAPER_TABLES, WIDTHS

CURVES = [c for table in PAPER_TABLES.values() for c in (table.key_curve, table.value_curve)]
WEIGHT = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))
# 2 bits that distort more than eviction, and 4 and 8 bits off the convex hull, as measurement may find them
ODD_CURVES = [(1.0, 1.7, 0.3, 0.01, 0.0), (1.0, 0.9, 0.85, 0.2, 0.0), (1.0, 0.1, 0.1, 0.1, 0.1)]
CURVE = st.sampled_from([*CURVES, *ODD_CURVES])
# bits alone; with headers; 8 bits as dear as 16; 16 bits the cheapest above 0
KEYS = (0, 5, 9, 17, 32)
COSTS = st.sampled_from([WIDTHS, KEYS, (0, 40, 48, 64, 64), (0, 34, 36, 40, 16)])
FEWER = st.sampled_from([(2, 4, 8, 16), (0, 16), (0, 4, 16), (0, 2, 8), (4, 16), (8,)])


def brute_force(weights, curve, costs, widths, budget):
    """The least distortion of all allocations within the budget."""
    chosen = itertools.product([WIDTHS.index(width) for width in widths], repeat=len(weights))
    return min(
        math.fsum(w * curve[i] for w, i in zip(weights, indexes, strict=True))
        for indexes in chosen
        if sum(costs[i] for i in indexes) <= budget
    )


def exact_optimum(weights, curve, costs, budget):
    """The plain dynamic programme over all units, for instances too large to enumerate."""
    best = [0.0] * (budget + 1)
    for w in weights:
        best = [
            min(best[s - cost] + w * e for cost, e in zip(costs, curve, strict=True) if cost <= s)
            for s in range(budget + 1)
        ]
    return best[budget]


def solve(weights, curve, costs, budget, widths=WIDTHS):
    return solve_knapsack(
        torch.tensor([weights], dtype=torch.float64),
        curve,
        torch.tensor([budget]),
        costs=costs,
        widths=widths,
    )


def of_widths(numbers, bits):
    """For each unit the number of its width, of one for each of `WIDTHS`; float64."""
    table = torch.zeros(17, dtype=torch.float64)
    table[list(WIDTHS)] = torch.tensor(numbers, dtype=torch.float64)
    return table[bits.long()]


def distortion(weights, curve, bits):
    """`sum_u w_u epsilon(b_u)` of each head, float64 `[H]`."""
    return (weights.double() * of_widths(curve, bits)).sum(dim=1)


def spent(costs, bits):
    """`sum_u c(b_u)` of each head, float64 `[H]`."""
    return of_widths(costs, bits).sum(dim=1)


def first_gains_left(weights, curve, costs, widths, bits):
    """lambda of each head: the largest gain per cost that the hull still has for a unit, float64 `[H]`."""
    hull = lower_hull(tuple(curve), tuple(costs), tuple(widths))
    left = dict(zip(hull.widths, [*hull.gains, 0.0], strict=True))
    return (weights.double() * of_widths([left.get(width, 0.0) for width in WIDTHS], bits)).amax(dim=1)


def lower_bounds(weights, curve, costs, widths, bits, budgets):
    """The dual (Prop. A.3) at `first_gains_left`: `sum_u min_b [w_u epsilon(b) + lambda c(b)] - lambda B`,
    float64 `[H]`. Every allocation within the budget has at least this distortion."""
    lam = first_gains_left(weights, curve, costs, widths, bits)
    least = torch.stack(
        [weights.double() * curve[i] + (lam * costs[i])[:, None] for i in map(WIDTHS.index, widths)]
    ).amin(dim=0)
    return (least.sum(dim=1) - lam * budgets).clamp(min=0)


def check(bits, weights, curve, costs, budget, widths=WIDTHS):
    """Returns the distortion and its lower bound. No increment that gains something fits what is left, and
    the gap to the bound is less than lambda times the largest increment (Prop. A.3)."""
    assert bits.dtype == torch.uint8
    assert set(bits[0].tolist()) <= set(widths)
    left = budget - int(spent(costs, bits))
    assert left >= 0
    hull = lower_hull(tuple(curve), tuple(costs), tuple(widths))
    following = dict(zip(hull.widths, hull.steps, strict=False))
    unspent = [b for w, b in zip(weights, bits[0].tolist(), strict=True) if w > 0 and b in following]
    assert all(left < following[b] for b in unspent)
    rows, budgets = torch.tensor([weights], dtype=torch.float64), torch.tensor([budget])
    lam = float(first_gains_left(rows, curve, costs, widths, bits))
    assert (lam > 0) == bool(unspent)
    value = float(distortion(rows, curve, bits))
    bound = float(lower_bounds(rows, curve, costs, widths, bits, budgets))
    largest = max(hull.steps, default=0)
    assert value - bound <= lam * largest * (1 + 1e-9) + 1e-9 * max(weights)
    assert 0 <= bound <= value * (1 + 1e-9) + 1e-12
    return value, bound


@given(weights=st.lists(WEIGHT, min_size=1, max_size=4), curve=CURVE, costs=COSTS, budget=st.integers(0, 260))
def test_the_bound_of_small_instances_is_below_brute_force(weights, curve, costs, budget):
    value, bound = check(solve(weights, curve, costs, budget), weights, curve, costs, budget)
    optimum = brute_force(weights, curve, costs, WIDTHS, budget)
    assert optimum <= value * (1 + 1e-9)
    assert bound <= optimum * (1 + 1e-9) + 1e-12


@given(
    weights=st.lists(WEIGHT, min_size=1, max_size=5),
    curve=CURVE,
    costs=COSTS,
    widths=FEWER,
    spare=st.integers(0, 250),
)
def test_the_bound_of_fewer_widths_is_below_brute_force(weights, curve, costs, widths, spare):
    budget = min(costs[WIDTHS.index(width)] for width in widths) * len(weights) + spare
    solution = solve(weights, curve, costs, budget, widths)
    value, bound = check(solution, weights, curve, costs, budget, widths)
    optimum = brute_force(weights, curve, costs, widths, budget)
    assert optimum <= value * (1 + 1e-9)
    assert bound <= optimum * (1 + 1e-9) + 1e-12


@settings(max_examples=6)
@given(num_units=st.integers(250, 300), average=st.floats(0.3, 6), seed=st.integers(0, 999))
@pytest.mark.parametrize("costs", [WIDTHS, KEYS], ids=["bits", "with headers"])
def test_instances_of_a_prompts_size_are_within_one_percent_of_the_optimum(costs, num_units, average, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_units, generator=generator).mul(2).exp().double().tolist()
    budget = int(average * num_units * costs[-1] / 16)
    bits = solve(weights, CURVES[1], costs, budget)
    value, _ = check(bits, weights, CURVES[1], costs, budget)
    assert value <= exact_optimum(weights, CURVES[1], costs, budget) * 1.01


@given(
    weights=st.lists(WEIGHT, min_size=1, max_size=150),
    curve=CURVE,
    costs=COSTS,
    widths=st.one_of(st.just(WIDTHS), FEWER),
    spare=st.integers(0, 3000),
)
def test_the_allocation_is_that_of_a_plain_greedy_loop(weights, curve, costs, widths, spare):
    budget = min(costs[WIDTHS.index(width)] for width in widths) * len(weights) + spare
    bits = solve(weights, curve, costs, budget, widths)
    assert bits[0].tolist() == reference.solve_knapsack(weights, curve, costs, widths, budget)
    check(bits, weights, curve, costs, budget, widths)


@pytest.mark.parametrize("average", [0.1, 0.5, 2, 7.3])
def test_the_duality_gap_of_long_prompts_is_negligible(average):
    generator = torch.Generator().manual_seed(4)
    weights, costs = torch.randn(3, 5000, generator=generator).mul(2).exp(), row_costs(64)
    budgets = torch.full((3,), int(average * 64 * 5000))
    bits = solve_knapsack(weights, CURVES[1], budgets, costs=costs)
    assert (spent(costs, bits) <= budgets).all()
    value = distortion(weights, CURVES[1], bits)
    gap = (value - lower_bounds(weights, CURVES[1], costs, WIDTHS, bits, budgets)) / value
    assert float(gap.max()) < 1e-3


def test_equal_weights_use_the_budget_and_not_more():
    bits = solve([1.0] * 1000, CURVES[1], WIDTHS, 1001)
    assert int(bits.sum()) == 1000
    value, bound = check(bits, [1.0] * 1000, CURVES[1], WIDTHS, 1001)
    assert (value - bound) / value < 2e-3


def test_increments_that_do_not_fit_are_passed_over():
    # the first unit's step to 16 bits costs 15; of the 9 that are left the second gets 5 and 4
    weights = [1e6, 1.0, *[1e-3] * 300]
    assert solve(weights, CURVES[1], KEYS, 17 + 9)[0, :3].tolist() == [8, 4, 0]


def test_a_width_that_costs_too_much_for_what_it_gains_is_left_out():
    # 2 bits are on the hull of bits, and off that of costs where a header is as dear as 4 bits
    curve = CURVES[5]
    assert lower_hull(curve, WIDTHS, WIDTHS).widths == WIDTHS
    assert lower_hull(curve, row_costs(8), WIDTHS).widths == (0, 4, 8, 16)
    assert lower_hull(curve, row_costs(1), WIDTHS).widths == (0, 16)
    assert lower_hull(curve, row_costs(4), (2, 4, 8, 16)).widths == (2, 4, 16)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 64, 96, 128, 576])
def test_a_rows_cost_is_its_codes_and_a_header(length):
    for width, cost in zip(WIDTHS, row_costs(length), strict=True):
        assert cost == width * length + {0: 0, 16: 0}.get(width, 16 + 16)


def test_heads_are_solved_as_if_alone():
    generator = torch.Generator().manual_seed(6)
    weights = torch.rand(4, 90, generator=generator) ** 3
    budgets = torch.tensor([0, 61, 800, 9999])
    together = solve_knapsack(weights, CURVES[0], budgets, costs=KEYS)
    for h in range(4):
        alone = solve_knapsack(weights[h : h + 1], CURVES[0], budgets[h : h + 1], costs=KEYS)
        assert torch.equal(together[h], alone[0])
    assert (spent(KEYS, together) <= budgets).all()
    assert together[0].eq(0).all()
    assert together[3].eq(16).all()


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_a_common_factor_of_the_weights_changes_nothing(factor):
    generator = torch.Generator().manual_seed(7)
    weights = torch.rand(2, 60, generator=generator, dtype=torch.float64)
    budgets = torch.tensor([200, 666])
    plain = solve_knapsack(weights, CURVES[0], budgets, costs=KEYS)
    scaled = solve_knapsack(weights * factor, CURVES[0], budgets, costs=KEYS)
    values = [distortion(weights, CURVES[0], bits) for bits in (plain, scaled)]
    torch.testing.assert_close(values[1], values[0], rtol=1e-9, atol=0)


def test_weights_of_zero_get_no_bits():
    assert solve([0.0, 1.0, 0.0], CURVES[0], KEYS, 100).tolist() == [[0, 16, 0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_impossible_weights_are_not_usable(bad):
    usable = torch.tensor([[0.0, 1.0]])
    assert are_usable(usable, usable)
    assert not are_usable(torch.tensor([[1.0, bad]]), usable)
    assert not are_usable(usable, torch.tensor([[1.0, bad]]))
