"""Triton building blocks of decode attention: appending rows, an online-softmax step, combining splits.

Shared by `dense_decode`, `hsa` and `trizone`; imported only by their Triton modules, because it imports
Triton. Tiles: BLOCK_G = G padded to 16 (rows beyond G are zeros), BLOCK_D = D padded to a power of two,
BLOCK_N tokens. Everything is accumulated in float32; logits are in units of log2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dependent_launch import begin_after_others, dependent
from kvferry.kernels.descriptors import MAX_SPLITS

LOG2_E = 1.4426950408889634
MIN_BLOCK_G = 16
_TANH_IS_ONE = tl.constexpr(64.0)
_HEADS_AT_ONCE = tl.constexpr(128)
_LOG2_E = tl.constexpr(LOG2_E)
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
_BLOCK_G = tl.constexpr(MIN_BLOCK_G)
_ROWS_AT_ONCE = tl.constexpr(32)
"""Rows of splits' parts that are combined at once."""


@triton.jit
def load_queries(query_ptr, bh, g, d, G: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr):
    """Load one head's queries, `[BLOCK_G, BLOCK_D]`, zero beyond G and D."""
    mask = (g[:, None] < G) & (d[None, :] < D)
    return tl.load(query_ptr + (bh * G + g[:, None]) * D + d[None, :], mask=mask, other=0.0).to(DOT)


@triton.jit
def first_state(sink_ptr, head, is_first, g, G: tl.constexpr, BLOCK_G: tl.constexpr, SINKS: tl.constexpr):
    """Return the running maximum and sum `[BLOCK_G]` of a split before its first tile.

    A head's first split begins with its sinks, `[H_kv, G]` logits of a token whose value is zero, so they are
    counted once where splits are combined.

    Args: head: the KV head; is_first: whether this is the head's first split.
    """
    if SINKS:
        sinks = tl.load(sink_ptr + head * G + g, mask=(g < G) & is_first, other=float("-inf"))
        highest = sinks.to(tl.float32) * _LOG2_E
        total = tl.where(highest == float("-inf"), 0.0, 1.0)
    else:
        highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
    return highest, total


@triton.jit
def attend_tile(
    q, k, v, ok, highest, total, acc, scale_log2, cap_log2=0.0, CAPPED: tl.constexpr = False
):  # fmt: skip
    """Run one online-softmax step.

    Args:
        q: `[BLOCK_G, BLOCK_D]`; k and v `[BLOCK_N, BLOCK_D]`, zero where not `ok` `[BLOCK_N]`.
        CAPPED: whether logits are `cap_log2 * tanh(scale_log2 q k / cap_log2)`.

    Returns: the new running maximum and sum `[BLOCK_G]`, and the unnormalised output `[BLOCK_G, BLOCK_D]`.
    """
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if CAPPED:
        # tanh x = 1 - 2 / (e^2x + 1), which is 1 where e^2x is large; NaN stays
        power = logits * (2.0 * _LOG2_E / cap_log2)
        power = tl.where(power > _TANH_IS_ONE, _TANH_IS_ONE, power)
        logits = cap_log2 * (1.0 - 2.0 / (tl.exp2(power) + 1.0))
    logits = tl.where(ok[None, :], logits, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(logits, 1))
    # no visible row yet: -inf - -inf would be NaN
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink = tl.exp2(highest - base)
    weights = tl.exp2(logits - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_highest, total, acc


@triton.jit
def split_range(num_tiles, split, num_splits, MIN_TILES: tl.constexpr):
    """Return the tiles of one split: begin, end, and the number of splits that have tiles, at least 1."""
    per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_TILES)
    begin = split * per_split
    return begin, tl.minimum(begin + per_split, num_tiles), tl.maximum(tl.cdiv(num_tiles, per_split), 1)


@triton.jit
def visible_rows(heads_ptr, h, ok, FIELDS: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the first row that a head's new token attends to, and how many from there on.

    Args: h: one head or several; ok: where not, there are no rows.
    """
    length = tl.load(heads_ptr + h * FIELDS + 2, mask=ok, other=0).to(tl.int32)
    if WINDOWED:
        window = tl.load(heads_ptr + h * FIELDS + 3, mask=ok, other=1).to(tl.int32)
        before = tl.load(heads_ptr + h * FIELDS + 4, mask=ok, other=-1).to(tl.int32)
        position = before + length - 1
        first = tl.where(before < 0, length - window, position - position % window - before)
        first = tl.maximum(first, 0)
    else:
        first = tl.zeros_like(length)
    return first, length - first


@triton.jit
def row_tiles(heads_ptr, h, ok, BLOCK_N: tl.constexpr, FIELDS: tl.constexpr, WINDOWED: tl.constexpr):
    """Count the tiles of heads of plain rows, and say whether they have an output: all do. See `place_of`."""
    _, count = visible_rows(heads_ptr, h, ok, FIELDS, WINDOWED)
    return tl.cdiv(count, BLOCK_N), ok


@triton.jit
def place_of(
    heads_ptr, num_heads, program, num_programs, TILES_OF: tl.constexpr, MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, FIELDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Find what one of more than `num_heads` programs attends to, so that all have about as many tiles.

    All programs read all lengths, on the device: a long head gets more programs.

    Args: TILES_OF: a function as `row_tiles`; its last argument is KIND.
    Returns: the head, or `num_heads` for a program that has nothing to do; its begin and end among the head's
        tiles; the head's first program, and how many it has, 1 to MAX_SPLITS.
    """
    h = tl.arange(0, _HEADS_AT_ONCE)
    total, longest = 0, 0
    for first in range(0, num_heads, _HEADS_AT_ONCE):
        tiles, _ = TILES_OF(heads_ptr, first + h, first + h < num_heads, BLOCK_N, FIELDS, KIND)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    # rounding up costs each head one program at most
    per_split = tl.maximum(tl.cdiv(total, num_programs - num_heads), tl.cdiv(longest, _MAX_SPLITS))
    per_split = tl.maximum(per_split, MIN_TILES)
    head, mine, first_program, num_splits, taken = num_heads, 0, 0, 1, 0
    for first in range(0, num_heads, _HEADS_AT_ONCE):
        tiles, there = TILES_OF(heads_ptr, first + h, first + h < num_heads, BLOCK_N, FIELDS, KIND)
        splits = tl.where(there, tl.maximum(tl.cdiv(tiles, per_split), 1), 0)
        after = taken + tl.cumsum(splits, 0)
        here = (after - splits <= program) & (program < after)
        if tl.sum(here.to(tl.int32), 0) > 0:
            head = first + tl.sum(tl.where(here, h, 0), 0)
            mine = tl.sum(tl.where(here, tiles, 0), 0)
            first_program = tl.sum(tl.where(here, after - splits, 0), 0)
            num_splits = tl.sum(tl.where(here, splits, 0), 0)
        taken += tl.sum(splits, 0)
    split = program - first_program
    # equal parts: the last is not a remainder
    begin, end = mine * split // num_splits, mine * (split + 1) // num_splits
    return head, begin, end, first_program, num_splits


@triton.jit
def log_sum(highest, total):
    """Compute log2 of the softmax denominator, -inf without rows."""
    return tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def finish_split(
    acc, highest, total, partial_ptr, lse_ptr, counter_ptr, out_ptr, bh, slot, first_slot, num_slots, g, d,
    G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write a head's output if it has one split; else write this split's part, and combine if it is the last.

    Args: acc `[BLOCK_G, BLOCK_D]` with d its channels; slot: this split's place in the workspace.
    """
    mask = (g[:, None] < G) & (d[None, :] < D)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    if num_slots == 1:
        tl.store(
            out_ptr + (bh * G + g[:, None]) * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask
        )
    else:
        tl.store(partial_ptr + (slot * G + g[:, None]).to(tl.int64) * D + d[None, :], out, mask=mask)
        tl.store(lse_ptr + slot * G + g, log_sum(highest, total), mask=g < G)
        combine_if_last(
            partial_ptr, lse_ptr, counter_ptr, out_ptr, bh, first_slot, num_slots, d, G, D
        )  # fmt: skip


@triton.jit
def store_part(partial_ptr, slot, value, g, channel, ok, G: tl.constexpr, D: tl.constexpr):
    """Store channels of one split's normalised output. Args: value `[BLOCK_G, channels]`; ok `[channels]`."""
    mask = (g[:, None] < G) & ok[None, :] & (channel[None, :] < D)
    at = (slot * G + g[:, None]).to(tl.int64) * D + channel[None, :]
    tl.store(partial_ptr + at, value, mask=mask)


@triton.jit
def combine_if_last(
    partial_ptr, lse_ptr, counter_ptr, out_ptr, bh, first_slot, num_slots, d,
    G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Count this split; the last of the head's `num_slots` adds up their parts and resets the counter."""
    # all threads must have written their parts before one of them counts the split
    tl.debug_barrier()
    done = tl.atomic_add(counter_ptr + bh, 1, sem="acq_rel")
    if done == num_slots - 1:
        # Rows of the workspace are (split, head of the group). They are loaded for all heads at a time: each
        # load waits for memory, so there should be few.
        g = tl.arange(0, _BLOCK_G)
        highest = tl.full([_BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([_BLOCK_G], tl.float32)
        out = tl.zeros([_BLOCK_G, d.shape[0]], tl.float32)
        # the operands of a product are in shared memory, and programs of wide heads have none to spare
        rows_at_once: tl.constexpr = _ROWS_AT_ONCE if d.shape[0] <= 128 else _ROWS_AT_ONCE // 2
        for first in range(0, num_slots * G, rows_at_once):
            r = first + tl.arange(0, rows_at_once)
            there = r < num_slots * G
            row = first_slot * G + r
            lse = tl.load(lse_ptr + row, mask=there, other=float("-inf"))
            mask = there[:, None] & (d[None, :] < D)
            part = tl.load(partial_ptr + row.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
            lse = tl.where((r % G)[None, :] == g[:, None], lse[None, :], float("-inf"))
            new_highest = tl.maximum(highest, tl.max(lse, 1))
            # no split with a row yet: -inf - -inf would be NaN
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weight, shrink = tl.exp2(lse - base[:, None]), tl.exp2(highest - base)
            total = total * shrink + tl.sum(weight, 1)
            # plain tf32 is too inexact, and float32 takes too many registers
            out = tl.dot(weight, part, out * shrink[:, None], input_precision="tf32x3")
            highest = new_highest
        out /= tl.where(total > 0, total, 1.0)[:, None]
        mask = (g[:, None] < G) & (d[None, :] < D)
        at = (bh * G + g[:, None]) * D + d[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(counter_ptr + bh, 0)


@triton.jit
def append_row(
    key_ptr, value_ptr, buffer_ptr, heads_ptr, bh,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Write row `length - 1` of one head, if it has a length. Args: bh: int64."""
    entry = heads_ptr + bh * FIELDS
    length = tl.load(entry + 2)
    d = tl.arange(0, BLOCK_D)
    mask = (d < D) & (length > 0)
    row = (length - 1) * D + d
    key = tl.load(key_ptr + bh * D + d, mask=mask, other=0.0)
    value = tl.load(value_ptr + bh * D + d, mask=mask, other=0.0)
    tl.store(buffer_ptr + tl.load(entry) + row, key, mask=mask)
    tl.store(buffer_ptr + tl.load(entry + 1) + row, value, mask=mask)


@triton.jit
def _append_rows_kernel(
    key_ptr, value_ptr, buffer_ptr, heads_ptr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
    bh = tl.program_id(0).to(tl.int64)
    append_row(key_ptr, value_ptr, buffer_ptr, heads_ptr, bh, D, BLOCK_D, FIELDS)


def append_rows(buffer: Tensor, heads: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write row `length - 1` of every head that has a length, in one launch.

    Args:
        buffer: the buffer that offsets count from, in the rows' dtype; rows are D elements apart.
        heads: int64 `[B * H_kv, F]`, see `descriptors.py`; lengths include the new row.
        keys, values: contiguous `[B, H_kv, D]`.
    """
    head_dim = keys.shape[2]
    _append_rows_kernel[(heads.shape[0],)](
        keys, values, buffer, heads,
        D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), FIELDS=heads.shape[1],
        **dependent(buffer.device), num_warps=1,
    )  # fmt: skip
