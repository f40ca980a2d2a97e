"""Takes increments of bits in their order until a head's budget is spent: the last part of RDKV's knapsack.

Called by `shared/compression/rdkv/allocation.py`, which orders all units' increments by gain per bit. Heads
are independent of one another; the host waits for nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.dispatch import run

NEAR = 64
"""How many increments after the first that does not fit are tried."""


def take_increments(
    order: Tensor, gained: Tensor, step_bits: Tensor, budgets: Tensor, *, num_units: int
) -> Tensor:
    """The bits of each unit: increments are taken in order while they fit and gain something; of the next
    `NEAR`, the first that fits is taken too.

    Args:
        order: int64 `[H, S U]`; an increment's number is its step times U plus its unit. A unit's increments
            come in their order.
        gained: float64 `[H, S U]`, what they gain per bit, descending.
        step_bits: int64 `[S]`, the bits of each step's increments.
        budgets: int64 `[H]`.
        num_units: U.

    Returns: int64 `[H, U]`.
    """
    in_torch = partial(take_increments_torch, order, gained, step_bits, budgets, num_units)
    if not order.numel():
        return in_torch()
    return run("knapsack", order.device, "knapsack.triton_kernel.take_increments", in_torch)


def take_increments_torch(
    order: Tensor, gained: Tensor, step_bits: Tensor, budgets: Tensor, num_units: int
) -> Tensor:
    """`take_increments` in torch."""
    taken = step_bits[order // max(num_units, 1)]
    fits = (taken.cumsum(dim=1) <= budgets[:, None]) & (gained > 0)
    units = order % max(num_units, 1)
    bits = torch.zeros(len(order), num_units, dtype=torch.int64, device=order.device)
    bits.scatter_add_(1, units, taken * fits)
    # the next few increments; of each unit, only the one after those it has
    near = fits.sum(dim=1, keepdim=True) + torch.arange(min(NEAR, order.shape[1]), device=order.device)
    inside = near < order.shape[1]
    near = near.clamp(max=max(order.shape[1] - 1, 0))
    unit, step = units.gather(1, near), (order // max(num_units, 1)).gather(1, near)
    left = budgets - bits.sum(dim=1)
    fits_still = inside & (gained.gather(1, near) > 0) & (step_bits[step] <= left[:, None])
    fits_still &= bits.gather(1, unit) == (step_bits.cumsum(0) - step_bits)[step]
    first = fits_still & (fits_still.cumsum(dim=1) == 1)
    return bits.scatter_add_(1, unit, step_bits[step] * first)
