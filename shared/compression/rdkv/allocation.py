"""Bit allocation of one layer: V tokens first, then K channels over the retained tokens (RDKV section 3.2).

Called by RDKV's compression between weights and packing. Budgets are in bits of codes; scales, minima and
indexes are not part of the budget and are counted separately.

Legend: H_kv KV heads, T prompt tokens, D head_dim, B_tok budget in tokens per head, n retained tokens; of the
knapsack: H heads, U units a head (V tokens or K channels), w weights, epsilon the distortion at each of
`WIDTHS`, B the budget.
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
    """V tokens get `16 B_tok` bits summed over a head's tokens, per channel; K channels get
    `floor(16 B_tok D / n)` bits summed over channels, per retained token, and at most `16 D`.

    The channel weights are those of the whole prompt; they are not recomputed for the retained tokens
    (section 3.2).

    Args:
        token_weights: `[H_kv, T]`.
        channel_weights: `[H_kv, D]`.
        budget_tokens: B_tok, at least 1: the budget is the bits of K and V of this many tokens in full
            precision.
        widths: the allowed widths (Table 4's ablations), ascending, a subset of `WIDTHS`; the budget must
            suffice for the least width for every token.
    """
    assert budget_tokens >= 1, budget_tokens
    num_kv_heads, num_tokens = token_weights.shape
    head_dim = channel_weights.shape[1]
    share = WIDTHS[-1] * min(budget_tokens, num_tokens)
    value_budget = torch.full((num_kv_heads,), share, dtype=torch.int64, device=token_weights.device)
    values = solve_knapsack(token_weights, table.value_curve, value_budget, widths=widths)
    kept = values.count_nonzero(dim=1)
    # of a head without tokens no channel is stored, whatever its bits
    key_budget = (share * head_dim // kept.clamp(min=1)).clamp(max=WIDTHS[-1] * head_dim)
    keys = solve_knapsack(channel_weights, table.key_curve, key_budget, widths=widths)
    return LayerAllocation(values=values, keys=keys, usable=are_usable(token_weights, channel_weights))


def are_usable(*weights: Tensor) -> Tensor:
    """Whether all weights are finite and at least 0: bool `[]`, on their device."""
    low, high = torch.cat([its.flatten() for its in weights]).aminmax()
    return (low >= 0) & (high < torch.inf)


def solve_knapsack(
    weights: Tensor, curve: Sequence[float], budget_bits: Tensor, *, widths: Sequence[int] = WIDTHS
) -> Tensor:
    """Minimise `sum_u w_u epsilon(b_u)` subject to `sum_u b_u <= B`: RDKV's multiple-choice knapsack (Eq. 6).

    The increments along epsilon's lower convex hull are taken in order of gain per bit, lambda. Those before
    the first that does not fit are the limit of Algorithm 2's bisection on lambda. Less than that increment's
    bits (at most 16) is then left, so a head's distortion exceeds the optimum by less than 16 lambda, lambda
    being that increment's (weak duality, Prop. A.3). Every later increment that still fits is taken, too,
    which only lowers the distortion. All heads are solved at once.

    Deviation: Algorithm 2 may return an allocation up to 1 % over budget, and leaves unspent what the
    bisection leaves. Here every head is within its budget, and what is left is filled.

    Args:
        weights: `[H, U]`, finite, at least 0 (`are_usable`).
        curve: epsilon at each of `WIDTHS`: 1 at 0 bits, then at least 0.
        budget_bits: int64 `[H]`, on the weights' device: bits summed over a head's units, at least U times
            the least width.
        widths: the widths that a unit may have, ascending, a subset of `WIDTHS`.

    Returns: uint8 `[H, U]`, each one of `widths`. Among equal gains the lowest unit comes first. Of a head
        whose weights are not finite or negative, any of them.
    """
    assert budget_bits.shape == weights.shape[:1], (weights.shape, budget_bits.shape)
    num_units, device = weights.shape[1], weights.device
    hull = lower_hull(tuple(curve), tuple(widths))
    reached, gains = _on_device(hull, device)
    weighed = weights.double()[:, None, :] * gains[None, :, None]
    gained, order = weighed.flatten(1).sort(dim=1, descending=True, stable=True)
    # every unit starts with the least width; the hull's increments are added to it
    budgets = budget_bits - widths[0] * num_units if widths[0] else budget_bits
    return reached[take_increments(order, gained, hull.steps, budgets, num_units=num_units)]


class Hull(NamedTuple):
    """The lower convex hull of epsilon from the least width on. For any lambda the best widths are on it.

    Attributes:
        widths: at its points.
        steps: bits from each point to the next.
        gains: of each step, per bit and unit weight; they descend.
    """

    widths: tuple[int, ...]
    steps: tuple[int, ...]
    gains: tuple[float, ...]


@functools.cache
def lower_hull(curve: tuple[float, ...], widths: tuple[int, ...]) -> Hull:
    """Return the hull of epsilon at some of `WIDTHS`. Args: curve: at each of `WIDTHS`; widths: as of
    `solve_knapsack`."""
    points = [(width, curve[WIDTHS.index(width)]) for width in widths]
    reached, steps, gains = [widths[0]], list[int](), list[float]()
    while better := [its for its in points if its[0] > points[0][0] and its[1] < points[0][1]]:
        width, epsilon = points[0]
        slopes = [(epsilon - its[1]) / (its[0] - width) for its in better]
        best = slopes.index(max(slopes))
        points = better[best:]
        reached.append(points[0][0])
        steps.append(points[0][0] - width)
        # rounding must not put a unit's later increment before an earlier one
        gains.append(min([slopes[best], *gains[-1:]]))
    return Hull(tuple(reached), tuple(steps), tuple(gains))


@functools.cache
def _on_device(hull: Hull, device: torch.device) -> tuple[Tensor, Tensor]:
    """A hull's widths, uint8, and gains, float64."""
    with torch.inference_mode(False):
        return (
            torch.tensor(hull.widths, dtype=torch.uint8, device=device),
            torch.tensor(hull.gains, dtype=torch.float64, device=device),
        )
