"""Taking increments in Triton: a program per head goes through its increments and stops at its budget."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.knapsack import NEAR

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_items", "num_units"])
def _take_increments_kernel(
    order_ptr, gained_ptr, step_ptr, budget_ptr, bits_ptr, num_items, num_units, num_steps,
    BLOCK: tl.constexpr, NEAR: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    order_ptr += head * num_items
    gained_ptr += head * num_items
    bits_ptr += head * num_units
    budget = tl.load(budget_ptr + head)
    s = tl.arange(0, BLOCK_S)
    of_step = tl.load(step_ptr + s, mask=s < num_steps, other=0)
    spent, place = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    start, going = tl.full([], 0, tl.int32), tl.full([], 1, tl.int32)
    while going > 0:
        i = start + tl.arange(0, BLOCK)
        number = tl.load(order_ptr + i, mask=i < num_items, other=0)
        gained = tl.load(gained_ptr + i, mask=i < num_items, other=0.0)
        step, unit = number // num_units, number % num_units
        its = tl.load(step_ptr + step)
        fits = (spent + tl.cumsum(its, 0) <= budget) & (gained > 0) & (i < num_items)
        # a unit's increments come in their order, so the most is the sum
        reached = tl.sum(tl.where(s[None, :] <= step[:, None], of_step[None, :], 0), 1)
        tl.atomic_max(bits_ptr + unit, reached, mask=fits)
        count = tl.sum(fits.to(tl.int32), 0)
        spent += tl.sum(tl.where(fits, its, 0), 0)
        place += count
        start += BLOCK
        going = ((count == BLOCK) & (start < num_items)).to(tl.int32)
    tl.debug_barrier()
    i = place + tl.arange(0, NEAR)
    number = tl.load(order_ptr + i, mask=i < num_items, other=0)
    gained = tl.load(gained_ptr + i, mask=i < num_items, other=0.0)
    step, unit = number // num_units, number % num_units
    its = tl.load(step_ptr + step)
    before = tl.sum(tl.where(s[None, :] < step[:, None], of_step[None, :], 0), 1)
    # past the first-level cache: atomics write beyond it
    bits = tl.load(bits_ptr + unit, cache_modifier=".cg")
    fits = (i < num_items) & (gained > 0) & (its <= budget - spent) & (bits == before)
    first = tl.min(tl.where(fits, i, num_items), 0)
    tl.store(bits_ptr + unit, bits + its, mask=fits & (i == first))


def take_increments(
    order: Tensor, gained: Tensor, step_bits: Tensor, budgets: Tensor, num_units: int
) -> Tensor:
    """See `kernels.knapsack.take_increments`. Args: contiguous; at least one increment."""
    bits = torch.zeros(len(order), num_units, dtype=torch.int64, device=order.device)
    num_steps = step_bits.shape[0]
    _take_increments_kernel[(len(order),)](
        order, gained, step_bits, budgets, bits, order.shape[1], num_units, num_steps,
        BLOCK=_BLOCK, NEAR=NEAR, BLOCK_S=4, num_warps=4,
    )  # fmt: skip
    return bits
