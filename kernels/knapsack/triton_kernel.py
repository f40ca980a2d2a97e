"""Taking increments in Triton: a program per head goes through its increments once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.knapsack import costs_on

_BLOCK = 1024


@triton.jit
def _increments(order_ptr, gained_ptr, cost_ptr, i, num_items, num_units):
    """Load increments i of a head's order: step, unit, cost and gain; a gain of 0 beyond the last one."""
    number = tl.load(order_ptr + i, mask=i < num_items, other=0)
    gained = tl.load(gained_ptr + i, mask=i < num_items, other=0.0)
    step = number // num_units
    return step, number % num_units, tl.load(cost_ptr + step), gained


@triton.jit(do_not_specialize=["num_items", "num_units", "least"])
def _take_increments_kernel(
    order_ptr, gained_ptr, cost_ptr, budget_ptr, levels_ptr, num_items, num_units, least, BLOCK: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    order_ptr += head * num_items
    gained_ptr += head * num_items
    levels_ptr += head * num_units
    left = tl.load(budget_ptr + head)
    start, going = tl.full([], 0, tl.int32), tl.full([], 1, tl.int32)
    while going > 0:  # block by block, up to the first that does not fit
        i = start + tl.arange(0, BLOCK)
        step, unit, cost, gained = _increments(order_ptr, gained_ptr, cost_ptr, i, num_items, num_units)
        fits = (tl.cumsum(cost, 0) <= left) & (gained > 0)
        # a unit's increments come in their order
        tl.atomic_max(levels_ptr + unit, step + 1, mask=fits)
        count = tl.sum(fits.to(tl.int32), 0)
        left -= tl.sum(tl.where(fits, cost, 0), 0)
        start += count
        going = ((count == BLOCK) & (start < num_items)).to(tl.int32)
    going = ((left >= least) & (start < num_items)).to(tl.int32)
    while going > 0:  # each time a block further, or to the next that fits
        tl.debug_barrier()
        i = start + tl.arange(0, BLOCK)
        step, unit, cost, gained = _increments(order_ptr, gained_ptr, cost_ptr, i, num_items, num_units)
        # bypasses the first-level cache, because atomics write beyond it
        level = tl.load(levels_ptr + unit, cache_modifier=".cg")
        fits = (cost <= left) & (gained > 0) & (level == step)
        first = tl.min(tl.where(fits, i, start + BLOCK), 0)
        taken = fits & (i == first)
        tl.store(levels_ptr + unit, step + 1, mask=taken)
        left -= tl.sum(tl.where(taken, cost, 0), 0)
        start = tl.minimum(first + 1, start + BLOCK)
        going = ((left >= least) & (start < num_items) & (tl.max(gained, 0) > 0)).to(tl.int32)


def take_increments(
    order: Tensor, gained: Tensor, costs: tuple[int, ...], budgets: Tensor, num_units: int
) -> Tensor:
    """See `kernels.knapsack.take_increments`. Args: contiguous; at least one increment."""
    levels = torch.zeros(len(order), num_units, dtype=torch.int64, device=order.device)
    _take_increments_kernel[(len(order),)](
        order, gained, costs_on(costs, order.device), budgets, levels, order.shape[1], num_units, min(costs),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return levels
