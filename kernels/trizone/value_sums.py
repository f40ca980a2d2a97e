"""The V side of TriZone's packed zones: codes weighted by probabilities, widths apart.

Order of codes: `kernels/packed/value_rows.py`. A byte has channels i, i + stride, ..., a word two bytes: each
field of a word has its own accumulator. The caller applies each field's unit and the minima.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.trizone.unpack import code_of, high_byte


@triton.jit
def add_values(
    p, token, ok, halves_ptr, words_ptr, floats_ptr, rows, scales, minima, norm, j, lowest,
    a0, a1, a2, a3, a4, a5, a6, a7,
    VB: tl.constexpr, ROW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add `sum_t p_t v_t` of one tile's tokens: codes to a0 .. a7, minima to `lowest`.

    Args: p `[BLOCK_G, tokens]`; token `[tokens]`, its place in the zone; ROW: elements a row.
    """
    # counted from the head's first row: 32 bits suffice and take half the registers
    at = token[:, None] * ROW + j[None, :]
    mask = ok[:, None] & (j[None, :] < ROW)
    if VB == 16:
        a0 = tl.dot(p.to(tl.float16), tl.load(halves_ptr + rows + at, mask=mask, other=0.0), a0)
    else:
        scale = tl.load(floats_ptr + scales + token, mask=ok, other=0.0) * norm
        lowest += tl.sum(p * tl.load(floats_ptr + minima + token, mask=ok, other=0.0)[None, :], 1)
        scaled = (p * scale[None, :]).to(tl.float16)
        if VB == 2:
            # eight accumulators: unpack codes only after the minima, to save registers
            tl.debug_barrier()
        low = tl.load(words_ptr + rows + at, mask=mask, other=0)
        high = high_byte(low, ASM)
        if VB == 2:
            a0 = tl.dot(scaled, code_of(low, 3, ASM), a0)
            a1 = tl.dot(scaled, code_of(low, 12, ASM), a1)
            a2 = tl.dot(scaled, code_of(low, 48, ASM), a2)
            a3 = tl.dot(scaled, code_of(low, 192, ASM), a3)
            a4 = tl.dot(scaled, code_of(high, 3, ASM), a4)
            a5 = tl.dot(scaled, code_of(high, 12, ASM), a5)
            a6 = tl.dot(scaled, code_of(high, 48, ASM), a6)
            a7 = tl.dot(scaled, code_of(high, 192, ASM), a7)
        elif VB == 4:
            a0 = tl.dot(scaled, code_of(low, 15, ASM), a0)
            a1 = tl.dot(scaled, code_of(low, 240, ASM), a1)
            a4 = tl.dot(scaled, code_of(high, 15, ASM), a4)
            a5 = tl.dot(scaled, code_of(high, 240, ASM), a5)
        else:
            a0 = tl.dot(scaled, code_of(low, 255, ASM), a0)
            a4 = tl.dot(scaled, code_of(high, 255, ASM), a4)
    return lowest, a0, a1, a2, a3, a4, a5, a6, a7
