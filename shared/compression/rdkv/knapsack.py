"""The multiple-choice knapsack of RDKV (Eq. 6): one width for each unit, with the least weighted distortion
within a budget of bits.

Solved per KV head, all heads at once, between weights and packing. A unit is a V token or a K channel; the
solver does not tell them apart.

Legend: H heads, U units a head, w weights, epsilon the distortion at each of `WIDTHS`, B the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.compression.rdkv.epsilon import WIDTHS
from kvferry.shared.errors import KvferryError

CORE_UNITS = 32
"""How many units nearest to the water level are solved exactly; with no more units than this, all are."""


@dataclass(frozen=True, kw_only=True)
class KnapsackSolution:
    """The chosen widths, their distortion, and a lower bound for it.

    Attributes:
        bits: uint8 `[H, U]`, each one of `WIDTHS`; a head's sum is at most its budget.
        distortion: float64 `[H]`, `sum_u w_u epsilon(b_u)`.
        lower_bound: float64 `[H]`, a value of the dual (Prop. A.3): every allocation within the budget has at
            least this distortion.
    """

    bits: Tensor
    distortion: Tensor
    lower_bound: Tensor


def solve_knapsack(
    weights: Tensor, curve: Sequence[float], budget_bits: Tensor, *, widths: Sequence[int] = WIDTHS
) -> KnapsackSolution:
    """Minimise `sum_u w_u epsilon(b_u)` subject to `sum_u b_u <= B`.

    First the increments along the hull are taken in order of gain per bit, which is the limit of Algorithm
    2's bisection on lambda. Then a dynamic programme solves the units nearest to the water level exactly.

    Deviation: Algorithm 2 may return an allocation up to 1 % over budget. Here every head is within it.

    Args:
        weights: `[H, U]`, finite, at least 0.
        curve: epsilon at each of `WIDTHS`: 1 at 0 bits, then at least 0.
        budget_bits: int64 `[H]`: bits summed over a head's units, at least U times the least width.
        widths: the widths that a unit may have, ascending, a subset of `WIDTHS`.

    Raises:
        KvferryError: a weight is negative or not finite.
    """
    assert len(curve) == len(WIDTHS), curve
    assert curve[0] == 1.0, curve
    assert min(curve) >= 0.0, curve
    assert budget_bits.shape == weights.shape[:1], (weights.shape, budget_bits.shape)
    assert [width for width in WIDTHS if width in widths] == list(widths), widths
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise KvferryError("distortion weights must be finite and at least 0; some are not")
    costs = weights.double()
    offered = _Offered(widths=tuple(widths), curve=tuple(curve[WIDTHS.index(w)] for w in widths))
    # Every unit starts with the least width; the hull's increments are added to it.
    least = widths[0] * weights.shape[1]
    budgets = budget_bits.to(costs.device, torch.int64)
    assert bool((budgets >= least).all()), (budgets, least)
    hull = _hull(offered)
    increments, level = _fill(costs, hull, budgets - least)
    bits = _settle_core(costs, offered, hull, increments + widths[0], budgets, level)
    table = costs.new_zeros(WIDTHS[-1] + 1)
    table[list(WIDTHS)] = costs.new_tensor(curve)
    return KnapsackSolution(
        bits=bits.to(torch.uint8),
        distortion=(costs * table[bits]).sum(dim=1),
        lower_bound=_dual(costs, offered, level, budgets).clamp(min=0.0),
    )


@dataclass(frozen=True, kw_only=True)
class _Offered:
    """The widths that units may have, ascending, and epsilon at each."""

    widths: tuple[int, ...]
    curve: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class _Hull:
    """The increments along the lower convex hull of epsilon: bits, and gain per bit and unit weight, which
    descends. For any lambda the cheapest widths are on the hull."""

    bits: tuple[int, ...]
    gains: tuple[float, ...]


def _hull(offered: _Offered) -> _Hull:
    widths, curve = offered.widths, offered.curve
    steps: list[int] = []
    gains: list[float] = []
    at = 0
    while True:
        slopes = {
            i: (curve[at] - curve[i]) / (widths[i] - widths[at])
            for i in range(at + 1, len(widths))
            if curve[i] < curve[at]
        }
        if not slopes:
            return _Hull(bits=tuple(steps), gains=tuple(gains))
        best = max(slopes, key=slopes.__getitem__)
        steps.append(widths[best] - widths[at])
        # Rounding must not put a unit's later increment before an earlier one.
        gains.append(min(slopes[best], gains[-1]) if gains else slopes[best])
        at = best


def _fill(costs: Tensor, hull: _Hull, budgets: Tensor) -> tuple[Tensor, Tensor]:
    """Take increments in order of gain per bit, the lowest unit first among equals, until one does not fit.

    Returns: bits, int64 `[H, U]`; the gain per bit of the increment that does not fit, float64 `[H]`, which
        is the lambda with the greatest dual value; 0 if every increment with a gain fits.
    """
    num_units = costs.shape[1]
    steps = torch.tensor(hull.bits, dtype=torch.int64, device=costs.device)
    gained = (costs[:, None, :] * costs.new_tensor(hull.gains)[None, :, None]).flatten(1)
    gained, order = gained.sort(dim=1, descending=True, stable=True)
    taken = steps.repeat_interleave(num_units)[order]
    fits = (taken.cumsum(dim=1) <= budgets[:, None]) & (gained > 0)
    units = order % max(num_units, 1)
    bits = torch.zeros_like(costs, dtype=torch.int64).scatter_add_(1, units, taken * fits)
    beyond = torch.nn.functional.pad(gained, (0, 1)).gather(1, fits.sum(dim=1, keepdim=True))
    return bits, beyond[:, 0].clamp(min=0.0)


def _settle_core(
    costs: Tensor, offered: _Offered, hull: _Hull, bits: Tensor, budgets: Tensor, level: Tensor
) -> Tensor:
    """Choose the widths of the units nearest to the water level again, exactly, with the bits that these
    units have and those left over.

    A dynamic programme over "best distortion of the first m units with at most 2 s bits".

    Returns: int64 `[H, U]`.
    """
    num_heads, num_units = costs.shape
    size = min(CORE_UNITS, num_units)
    if size == 0 or num_heads == 0 or not hull.bits:
        return bits
    core = _nearest_units(costs, hull, level, size)
    held = bits.gather(1, core)
    rooms = (held.sum(dim=1) + budgets - bits.sum(dim=1)).clamp(max=size * WIDTHS[-1]) // 2
    num_states = int(rooms.max()) + 1
    prices = costs.gather(1, core)[:, :, None] * costs.new_tensor(offered.curve)
    best = costs.new_zeros(num_heads, num_states)
    choices = []
    widths = torch.tensor(offered.widths, device=costs.device)
    before = torch.arange(num_states, device=costs.device)[:, None] + (WIDTHS[-1] - widths) // 2
    for m in range(size):
        padded = torch.nn.functional.pad(best, (WIDTHS[-1] // 2, 0), value=torch.inf)
        best, choice = (padded[:, before] + prices[:, m, None, :]).min(dim=2)
        choices.append(choice)
    state = rooms
    chosen = []
    for choice in reversed(choices):
        width = widths[choice.gather(1, state[:, None])[:, 0]]
        chosen.append(width)
        state = state - width // 2
    return bits.scatter(1, core, torch.stack(chosen[::-1], dim=1))


def _nearest_units(costs: Tensor, hull: _Hull, lam: Tensor, size: int) -> Tensor:
    """The units with an increment whose gain per bit is nearest to lambda, by ratio: int64 `[H, size]`."""
    tiny = torch.finfo(torch.float64).tiny
    ratios = (costs.clamp(min=tiny).log() - lam.clamp(min=tiny).log()[:, None])[:, None, :]
    gains = costs.new_tensor(hull.gains).log()[None, :, None]
    distance = (ratios + gains).abs().amin(dim=1)
    return distance.sort(dim=1, stable=True).indices[:, :size]


def _dual(costs: Tensor, offered: _Offered, lam: Tensor, budgets: Tensor) -> Tensor:
    """Prop. A.3: `g(lambda) = sum_u min_b [w_u epsilon(b) + lambda b] - lambda B`, float64 `[H]`."""
    least = torch.full_like(costs, torch.inf)
    for width, epsilon in zip(offered.widths, offered.curve, strict=True):
        least = torch.minimum(least, costs * epsilon + (lam * width)[:, None])
    return least.sum(dim=1) - lam * budgets
