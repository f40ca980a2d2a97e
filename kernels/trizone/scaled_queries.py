"""TriZone's first launch: queries in the packed channels' order and scale.

    _prologue_kernel  (entry): permutes the queries to the packed channels' order, folds the K scales in,
                      rounds to float16 at a power of two per query head, and sums what the codes' "1" adds;
                      clears the output of as many heads, because no item writes that of an empty slot

Imported only by the Triton modules of this folder, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

STATISTICS = 8
"""float32 a query head: four biases, 2^-e, the minima's term, 2^(e - e16), unused."""


@triton.jit
def power_of_two(exponent):
    """2^exponent, of -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent_to(size, TARGET: tl.constexpr):
    """The exponent e within +-60 with which size * 2^e lies in [2^TARGET, 2^(TARGET + 1)); 0 for size 0."""
    own = (size.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(size > 0, tl.minimum(tl.maximum(TARGET - own, -60), 60), 0)


@triton.jit
def _prologue_kernel(
    query_ptr, half_words_ptr, floats_ptr, entries_ptr, scaled_ptr, statistics_ptr, out_ptr, scale_log2,
    num_heads,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    row = entries_ptr + entry * FIELDS
    bh = tl.load(row)
    n2, n4 = tl.load(row + 1), tl.load(row + 2)
    coded = n2 + n4 + tl.load(row + 3)
    kept = coded + tl.load(row + 4)
    g, c = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    channel = tl.load(half_words_ptr + tl.load(row + 10) + c, mask=c < kept, other=0).to(tl.int32)
    # a packed index is checked when it is received; this keeps reads in bounds whatever the bytes are
    channel = tl.minimum(tl.maximum(channel, 0), D - 1)
    # heads have one entry or more: one program clears the head of its own number
    nothing = tl.zeros([BLOCK_G, BLOCK_D], out_ptr.dtype.element_ty)
    there = (g[:, None] < G) & (c[None, :] < D) & (entry < num_heads)
    tl.store(out_ptr + (entry * G + g[:, None]) * D + c[None, :], nothing, mask=there)
    mask = (g[:, None] < G) & (c[None, :] < kept)
    q = tl.load(query_ptr + (bh * G + g[:, None]) * D + channel[None, :], mask=mask, other=0.0)
    q = q.to(tl.float32) * scale_log2
    scale = tl.load(floats_ptr + tl.load(row + 11) + c, mask=c < coded, other=0.0).to(tl.float32)
    minimum = tl.load(floats_ptr + tl.load(row + 12) + c, mask=c < coded, other=0.0).to(tl.float32)
    # a code under the lowest mask reads as code / 1024
    of_codes = q * (scale * 1024.0)[None, :]
    of_halves = tl.where(c[None, :] >= coded, q, 0.0)
    exponent = _exponent_to(tl.max(tl.abs(of_codes), 1), 9)
    exponent_16 = _exponent_to(tl.max(tl.abs(of_halves), 1), 9)
    rounded = (of_codes * power_of_two(exponent)[:, None]).to(tl.float16)
    rounded_16 = (of_halves * power_of_two(exponent_16)[:, None]).to(tl.float16)
    tl.store(
        scaled_ptr + (entry * BLOCK_G + g[:, None]) * BLOCK_D + c[None, :],
        tl.where(c[None, :] >= coded, rounded_16, rounded),
    )  # fmt: skip
    statistics = statistics_ptr + (entry * BLOCK_G + g) * 8
    for f in tl.static_range(4):
        # sums of the products as the main kernel rounds them, not of the queries
        by_2, by_4 = (rounded * (0.25**f)).to(tl.float32), (rounded * (0.0625 ** (f % 2))).to(tl.float32)
        used = tl.where(
            (c < n2)[None, :], by_2, tl.where((c < n2 + n4)[None, :], by_4, rounded.to(tl.float32))
        )
        tl.store(statistics + f, tl.sum(used, 1))
    tl.store(statistics + 4, power_of_two(-exponent))
    tl.store(statistics + 5, tl.sum(q * minimum[None, :], 1))
    tl.store(statistics + 6, power_of_two(exponent - exponent_16))


@triton.jit
def queries_of(scaled_ptr, g, c, ok, BLOCK_D: tl.constexpr):
    """`[BLOCK_G, channels]` of one entry's scaled queries, zero where not ok `[channels]`."""
    return tl.load(scaled_ptr + g[:, None] * BLOCK_D + c[None, :], mask=ok[None, :], other=0.0)
