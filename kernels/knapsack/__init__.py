"""Takes increments of width in their order while they fit a head's budget: the last part of RDKV's knapsack.

Called by `shared/compression/rdkv/allocation.py`, which orders all units' increments by gain per bit. Heads
are independent of one another; the host waits for nothing.
"""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.dispatch import run


def take_increments(
    order: Tensor, gained: Tensor, costs: tuple[int, ...], budgets: Tensor, *, num_units: int
) -> Tensor:
    """Return how many increments each unit gets. One after another, an increment is taken if it fits what is
    left, gains something and follows the unit's last one.

    All increments up to the first that does not fit are taken. What is left then is less than the largest
    cost, and each later increment takes at least the smallest cost, so few are taken after it.

    Args:
        order: int64 `[H, S U]`; an increment's number is its step times U plus its unit. A unit's increments
            come in their order.
        gained: float64 `[H, S U]`, what they gain per bit, descending.
        costs: S numbers of at least 1: the bits of each step's increments.
        budgets: int64 `[H]`.
        num_units: U.

    Returns: int64 `[H, U]`, 0 to S.
    """
    if not order.numel():
        return torch.zeros(len(order), num_units, dtype=torch.int64, device=order.device)
    in_torch = partial(take_increments_torch, order, gained, costs, budgets, num_units)
    return run("knapsack", order.device, "knapsack.triton_kernel.take_increments", in_torch)


def take_increments_torch(
    order: Tensor, gained: Tensor, costs: tuple[int, ...], budgets: Tensor, num_units: int
) -> Tensor:
    """Compute `take_increments` in torch. Args: at least one increment."""
    num_items, device = order.shape[1], order.device
    cost_of = costs_on(costs, device)
    taken = cost_of[order // num_units]
    gains = gained > 0
    fits = (taken.cumsum(dim=1) <= budgets[:, None]) & gains
    left = budgets - (taken * fits).sum(dim=1)
    # the places of each unit's increments in the order, and one more that is never reached
    places = torch.full((len(order), len(costs) + 1, num_units), num_items, device=device)
    places.flatten(1).scatter_(1, order, torch.arange(num_items, device=device).expand_as(order))
    levels = (places < fits.sum(dim=1)[:, None, None]).sum(dim=1)
    num_gaining = gains.sum(dim=1, keepdim=True)
    for _ in range((max(costs) - 1) // min(costs)):
        # the next increment of each unit; of these the first that fits
        cost, place = cost_of[levels], places.gather(1, levels[:, None])[:, 0]
        first, unit = place.masked_fill(cost > left[:, None], num_items).min(dim=1, keepdim=True)
        found = first < num_gaining
        levels.scatter_add_(1, unit, found.long())
        left = left - (cost.gather(1, unit) * found)[:, 0]
    return levels


@functools.cache
def costs_on(costs: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the steps' costs on a device, and 0 after the last step's: int64 `[S + 1]`."""
    with torch.inference_mode(False):
        return torch.tensor([*costs, 0], dtype=torch.int64, device=device)
