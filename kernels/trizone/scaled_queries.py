"""TriZone's first launch: new rows, and queries in the packed channels' order.

    _prologue_kernel  (entry): permutes the queries to the packed channels' order, as float16 numbers times a
                      power of two; writes the new row of as many heads, and clears their output, because no
                      item writes that of an empty slot

Imported only by the Triton modules of this folder, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.dependent_launch import begin_after_others
from kvferry.kernels.split_attention import append_row


@triton.jit
def _power_of_two(exponent):
    """Compute 2^exponent, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent_to(size, TARGET: tl.constexpr):
    """Find e within +-60 such that size * 2^e lies in [2^TARGET, 2^(TARGET + 1)); 0 for size 0."""
    own = (size.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(size > 0, tl.minimum(tl.maximum(TARGET - own, -60), 60), 0)


@triton.jit
def _prologue_kernel(
    query_ptr, half_words_ptr, entries_ptr, scaled_ptr, undo_ptr, out_ptr, new_key_ptr, new_value_ptr,
    buffer_ptr, heads_ptr, scale_log2, num_heads, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, FIELDS: tl.constexpr, HEAD_FIELDS: tl.constexpr, APPEND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
    entry = tl.program_id(0)
    row = entries_ptr + entry * FIELDS
    bh = tl.load(row)
    kept = tl.load(row + 1) + tl.load(row + 2) + tl.load(row + 3) + tl.load(row + 4)
    g, c = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    channel = tl.load(half_words_ptr + tl.load(row + 10) + c, mask=c < kept, other=0).to(tl.int32)
    # a packed index is checked when it is received; this keeps reads in bounds whatever the bytes are
    channel = tl.minimum(tl.maximum(channel, 0), D - 1)
    # heads have one entry or more: one program appends and clears for the head of its own number
    if APPEND:  # noqa: SIM102, a constant: where it is false, nothing of the branch is compiled
        if entry < num_heads:
            append_row(
                new_key_ptr, new_value_ptr, buffer_ptr, heads_ptr, entry.to(tl.int64), D, BLOCK_D, HEAD_FIELDS
            )
    nothing = tl.zeros([BLOCK_G, BLOCK_D], out_ptr.dtype.element_ty)
    there = (g[:, None] < G) & (c[None, :] < D) & (entry < num_heads)
    tl.store(out_ptr + (entry * G + g[:, None]) * D + c[None, :], nothing, mask=there)
    mask = (g[:, None] < G) & (c[None, :] < kept)
    q = tl.load(query_ptr + (bh * G + g[:, None]) * D + channel[None, :], mask=mask, other=0.0)
    q = q.to(tl.float32)
    exponent = _exponent_to(tl.max(tl.abs(q), 1), 14)
    at = (entry * BLOCK_G + g[:, None]) * BLOCK_D + c[None, :]
    tl.store(scaled_ptr + at, (q * _power_of_two(exponent)[:, None]).to(tl.float16))
    tl.store(undo_ptr + entry * BLOCK_G + g, _power_of_two(-exponent) * scale_log2)
