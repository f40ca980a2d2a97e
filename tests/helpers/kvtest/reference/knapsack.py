"""RDKV's knapsack, one head, unit and increment after another. For tests only.

A width b of a unit u costs c(b) and leaves the distortion w_u epsilon(b); c and epsilon are given at each of
`WIDTHS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

WIDTHS = (0, 2, 4, 8, 16)


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


def hull_widths(curve: Sequence[float], costs: Sequence[int], widths: Sequence[int]) -> list[int]:
    """The widths that minimise `epsilon(b) + lambda c(b)` for some lambda above 0, from the cheapest on."""
    hull: list[tuple[int, float, int]] = []
    for point in sorted((costs[i], curve[i], WIDTHS[i]) for i in map(WIDTHS.index, widths)):
        if hull and point[1] >= hull[-1][1]:
            continue  # another costs no more and distorts no more
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) > _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [width for _, _, width in hull]


def _slope(one: tuple[int, float, int], other: tuple[int, float, int]) -> Fraction:
    return (Fraction(other[1]) - Fraction(one[1])) / (other[0] - one[0])


def solve_knapsack(
    weights: Sequence[float],
    curve: Sequence[float],
    costs: Sequence[int],
    widths: Sequence[int],
    budget: int,
) -> list[int]:
    """The greedy allocation: increments along the hull in order of gain per cost, each that fits."""
    hull = [WIDTHS.index(width) for width in hull_widths(curve, costs, widths)]
    increments = []
    for step, (i, j) in enumerate(itertools.pairwise(hull)):
        gain = (curve[i] - curve[j]) / (costs[j] - costs[i])
        increments += [(-weight * gain, step, unit) for unit, weight in enumerate(weights)]
    levels, left = [0] * len(weights), budget - costs[hull[0]] * len(weights)
    for gained, step, unit in sorted(increments):
        cost = costs[hull[step + 1]] - costs[hull[step]]
        if gained < 0 and cost <= left and levels[unit] == step:
            levels[unit] += 1
            left -= cost
    return [WIDTHS[hull[level]] for level in levels]
