"""Bit allocation of one layer: V tokens first, then K channels over the retained tokens (RDKV section 3.2).

Called by RDKV's compression between weights and packing. Budgets are in bits of codes and their headers, a
scale and a minimum each; positions and channel numbers are not part of them.

Legend: H_kv KV heads, T prompt tokens, D head_dim, B_tok budget in tokens per head, n retained tokens; of the
knapsack: H heads, U units a head (V tokens or K channels), w weights, epsilon the distortion and c the cost
at each of `WIDTHS`, B the budget.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry.kernels.knapsack import take_increments
from kvferry.shared.compression.rdkv.epsilon import WIDTHS, EpsilonTable

HEADER_BITS = 32
"""A scale and a minimum, float16, of a row of codes; values of 16 bits have none."""
KEY_GROUP_TOKENS = 64
"""Retained tokens of a K channel that have one header."""


@dataclass(frozen=True, kw_only=True)
class LayerAllocation:
    """The widths of one layer.

    Attributes:
        values: bits, uint8 `[H_kv, T]`, of V tokens; with 0 the token is dropped, K and V.
        keys: bits, uint8 `[H_kv, D]`, of K channels over the retained tokens; with 0 the channel is dropped.
        usable: bool `[]`, on the device: whether all weights are finite and at least 0. If not, the widths
            mean nothing; packing reads it together with their counts.
    """

    values: Tensor
    keys: Tensor
    usable: Tensor


def allocate(
    token_weights: Tensor,
    channel_weights: Tensor,
    *,
    budget_tokens: int,
    table: EpsilonTable,
    widths: Sequence[int] = WIDTHS,
) -> LayerAllocation:
    """Allocate bits. V gets `16 B_tok D` bits a head; K gets as many, which is `16 B_tok D / n` for each
    retained token, but at most `16 D`.

    A value of V costs `b + 32/D` bits, one of K `b + 1/2`: a token's V has a header, and so has each group
    of 64 retained tokens of a K channel. At 16 bits there is none.

    The channel weights are those of the whole prompt; they are not recomputed for the retained tokens
    (section 3.2).

    Deviation: the paper counts codes alone. Here headers are in the budget, so that K and V are within the
    bytes of B_tok tokens in full precision with all but their index. K may be over by part of a header a
    channel, since its last group may be short.

    Args:
        token_weights: `[H_kv, T]`.
        channel_weights: `[H_kv, D]`.
        budget_tokens: B_tok, at least 1: the budget is the bits of K and V of this many tokens in full
            precision.
        widths: the allowed widths (Table 4's ablations), ascending, a subset of `WIDTHS`; the budget must be
            their `least_budget` or more.
    """
    assert budget_tokens >= 1, budget_tokens
    num_kv_heads, num_tokens = token_weights.shape
    head_dim = channel_weights.shape[1]
    share, device = WIDTHS[-1] * head_dim * min(budget_tokens, num_tokens), token_weights.device
    value_budgets = torch.full((num_kv_heads,), share, dtype=torch.int64, device=device)
    values = solve_knapsack(
        token_weights, table.value_curve, value_budgets, costs=row_costs(head_dim), widths=widths
    )
    kept = values.count_nonzero(dim=1)
    # of a group of tokens; of a head without tokens no channel is stored, whatever its bits
    most = WIDTHS[-1] * head_dim * KEY_GROUP_TOKENS
    key_budgets = (share * KEY_GROUP_TOKENS // kept.clamp(min=1)).clamp(max=most)
    keys = solve_knapsack(
        channel_weights, table.key_curve, key_budgets, costs=row_costs(KEY_GROUP_TOKENS), widths=widths
    )
    return LayerAllocation(values=values, keys=keys, usable=are_usable(token_weights, channel_weights))


def row_costs(num_values: int) -> tuple[int, ...]:
    """Return the bits of a row of so many values at each of `WIDTHS`: codes, and a header where there is one.

    A row is what has one header: a token's V, of D values, or 64 tokens of a K channel.
    """
    return tuple(width * num_values + (HEADER_BITS if 0 < width < WIDTHS[-1] else 0) for width in WIDTHS)


def least_budget(widths: Sequence[int], *, num_tokens: int, head_dim: int) -> int:
    """Return the smallest B_tok that suffices for the cheapest of some widths for every token and channel."""

    def of_rows(num_values: int) -> int:
        cheapest = min(row_costs(num_values)[WIDTHS.index(width)] for width in widths)
        return -(-num_tokens * cheapest // (WIDTHS[-1] * num_values))

    return max(of_rows(head_dim), of_rows(KEY_GROUP_TOKENS), 1)


def are_usable(*weights: Tensor) -> Tensor:
    """Say whether all weights are finite and at least 0: bool `[]`, on their device."""
    low, high = torch.cat([tensor.flatten() for tensor in weights]).aminmax()
    return (low >= 0) & (high < torch.inf)


def solve_knapsack(
    weights: Tensor,
    curve: Sequence[float],
    budgets: Tensor,
    *,
    costs: Sequence[int],
    widths: Sequence[int] = WIDTHS,
) -> Tensor:
    """Minimise `sum_u w_u epsilon(b_u)` subject to `sum_u c(b_u) <= B`: RDKV's multiple-choice knapsack
    (Eq. 6), in which c is b.

    The increments along the lower convex hull of epsilon over c are taken in order of gain per cost, lambda.
    Those before the first that does not fit are the limit of Algorithm 2's bisection on lambda. Less than
    that increment's cost is then left, so a head's distortion exceeds the optimum by less than lambda times
    this cost (weak duality, Prop. A.3). Every later increment that still fits is taken, too, which only
    lowers the distortion. All heads are solved at once.

    Deviation: Algorithm 2 may return an allocation up to 1 % over budget, and leaves unspent what the
    bisection leaves. Here every head is within its budget, and what is left is filled.

    Args:
        weights: `[H, U]`, finite, at least 0 (`are_usable`).
        curve: epsilon at each of `WIDTHS`: 1 at 0 bits, then at least 0.
        budgets: int64 `[H]`, on the weights' device: costs summed over a head's units, at least U times the
            least.
        costs: at each of `WIDTHS`, at least 0; they need not ascend.
        widths: the widths that a unit may have, a subset of `WIDTHS`.

    Returns: uint8 `[H, U]`, each one of `widths`. Among equal gains the lowest unit comes first. For a
        head with weights that are negative or not finite, any of them.
    """
    assert budgets.shape == weights.shape[:1], (weights.shape, budgets.shape)
    num_units = weights.shape[1]
    hull = lower_hull(tuple(curve), tuple(costs), tuple(widths))
    reached, gains = _on_device(hull, weights.device)
    weighed = weights.double()[:, None, :] * gains[None, :, None]
    gained, order = weighed.flatten(1).sort(dim=1, descending=True, stable=True)
    # every unit starts with the cheapest width; the hull's increments are added to it
    left = budgets - hull.least * num_units if hull.least else budgets
    return reached[take_increments(order, gained, hull.steps, left, num_units=num_units)]


class Hull(NamedTuple):
    """The lower convex hull of epsilon over costs. For any lambda the best widths are on it.

    Attributes:
        widths: at its points, from the cheapest on.
        least: the first one's cost.
        steps: the cost from each point to the next.
        gains: of each step, per cost and unit weight; they descend.
    """

    widths: tuple[int, ...]
    least: int
    steps: tuple[int, ...]
    gains: tuple[float, ...]


@functools.cache
def lower_hull(curve: tuple[float, ...], costs: tuple[int, ...], widths: tuple[int, ...]) -> Hull:
    """Return the hull of some of `WIDTHS`. Args: as in `solve_knapsack`."""
    points = sorted((costs[i], curve[i], WIDTHS[i]) for i in map(WIDTHS.index, widths))
    least, _, first = points[0]
    reached, steps, gains = [first], list[int](), list[float]()
    while better := [point for point in points if point[0] > points[0][0] and point[1] < points[0][1]]:
        cost, epsilon, _ = points[0]
        slopes = [(epsilon - point[1]) / (point[0] - cost) for point in better]
        best = slopes.index(max(slopes))
        points = better[best:]
        reached.append(points[0][2])
        steps.append(points[0][0] - cost)
        # rounding must not put a unit's later increment before an earlier one
        gains.append(min([slopes[best], *gains[-1:]]))
    return Hull(tuple(reached), least, tuple(steps), tuple(gains))


@functools.cache
def _on_device(hull: Hull, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a hull's widths, uint8, and gains, float64."""
    with torch.inference_mode(False):
        return (
            torch.tensor(hull.widths, dtype=torch.uint8, device=device),
            torch.tensor(hull.gains, dtype=torch.float64, device=device),
        )
