"""Products with TriZone's packed codes, K and V, without an integer-to-float conversion.

`(word & mask) | 0x3C00` is the half `1 + code * 2^(shift - 10)`, code being the bits under the mask: one
integer instruction for a pair of codes. The "1" is taken off again by a bias (K: at most D channels are
summed) or by one subtraction, which is exact (V: all tokens are summed, and a bias would lose ten of the
sum's bits). In the interpreter, which has no inline assembly, plain integer operations do the same.

Order of codes: `kernels/packed/key_words.py` and `value_rows.py`. A tile of K is BLOCK_N / 16 token blocks of
128: words `[BLOCK_C, BLOCK_N]`, 8 tokens per lane; so there are eight logit tiles `[BLOCK_G, BLOCK_N]`, of
tokens f * lanes + lane of each block, f = 0 .. 7. A byte of V has channels i, i + stride, ..., a word two
bytes: each field of a word has its own accumulator; the caller applies each field's unit and the minima.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.trizone.scaled_queries import queries_of

_SHIFT = tl.constexpr("shr.b32 $0, $1, 8;")


@triton.constexpr_function
def _half_assembly(mask):
    """Two words at a time: 1006648320 is 0x3C003C00, two halves of 1; 0xEA is (a & b) | c."""
    return f"lop3.b32 $0, $1, {mask << 16 | mask}, 1006648320, 0xEA;"


@triton.constexpr_function
def _code_assembly(mask):
    return (
        f"{{ .reg .b32 one, sum; mov.b32 one, 1006648320; lop3.b32 sum, $1, {mask << 16 | mask}, one, 0xEA; "
        "sub.rn.f16x2 $0, sum, one; }"
    )


@triton.jit
def high_byte(words, ASM: tl.constexpr):
    """Each word's high byte in its low byte; the high byte is undefined."""
    if ASM:
        return tl.inline_asm_elementwise(_SHIFT, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    else:
        return words >> 8


@triton.jit
def half_of(words, MASK: tl.constexpr, ASM: tl.constexpr):
    """`1 + code * 2^(shift - 10)` as float16 of the code under MASK in each int16 word."""
    if ASM:
        return tl.inline_asm_elementwise(
            _half_assembly(MASK), "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return ((words & MASK) | 0x3C00).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def code_of(words, MASK: tl.constexpr, ASM: tl.constexpr):
    """`code * 2^(shift - 10)` as float16, exactly."""
    if ASM:
        return tl.inline_asm_elementwise(
            _code_assembly(MASK), "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return half_of(words, MASK, ASM) - 1.0


@triton.jit
def key_logits(
    scaled_ptr, halves_ptr, words_ptr, words, n2, n4, n8, n16, ratio, block, r, ok, g,
    BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Eight tiles of `sum_c q~_c v_c`, v the codes as `half_of` reads them, biases still in."""
    halves_ptr += words
    words_ptr += words
    start = block * (16 * (n2 + 2 * n4 + 4 * n8 + 8 * n16)) + r
    c0 = tl.arange(0, BLOCK_C)
    s0 = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    at_16 = start + 16 * (n2 + 2 * n4 + 4 * n8)
    # fewer at a time, because each needs eight tiles; 16 is the least for a product
    BLOCK_H: tl.constexpr = 16
    c16 = tl.arange(0, BLOCK_H)
    for c in range(0, n16, BLOCK_H):
        inside = c + c16 < n16
        q = queries_of(scaled_ptr, g, n2 + n4 + n8 + c + c16, inside, BLOCK_D)
        at = at_16[None, :] + (c + c16)[:, None] * 128
        mask = inside[:, None] & ok[None, :]
        s0 = tl.dot(q, tl.load(halves_ptr + at, mask=mask, other=0.0), s0)
        s1 = tl.dot(q, tl.load(halves_ptr + at + 16, mask=mask, other=0.0), s1)
        s2 = tl.dot(q, tl.load(halves_ptr + at + 32, mask=mask, other=0.0), s2)
        s3 = tl.dot(q, tl.load(halves_ptr + at + 48, mask=mask, other=0.0), s3)
        s4 = tl.dot(q, tl.load(halves_ptr + at + 64, mask=mask, other=0.0), s4)
        s5 = tl.dot(q, tl.load(halves_ptr + at + 80, mask=mask, other=0.0), s5)
        s6 = tl.dot(q, tl.load(halves_ptr + at + 96, mask=mask, other=0.0), s6)
        s7 = tl.dot(q, tl.load(halves_ptr + at + 112, mask=mask, other=0.0), s7)
    if n16 > 0:
        # 16-bit channels have their own power of two
        s0, s1, s2, s3 = s0 * ratio, s1 * ratio, s2 * ratio, s3 * ratio
        s4, s5, s6, s7 = s4 * ratio, s5 * ratio, s6 * ratio, s7 * ratio
    for c in range(0, n2, BLOCK_C):
        inside = c + c0 < n2
        q = queries_of(scaled_ptr, g, c + c0, inside, BLOCK_D)
        mask = inside[:, None] & ok[None, :]
        low = tl.load(words_ptr + start[None, :] + (c + c0)[:, None] * 16, mask=mask, other=0)
        high = high_byte(low, ASM)
        q1, q2, q3 = q * 0.25, q * 0.0625, q * 0.015625
        s0 = tl.dot(q, half_of(low, 3, ASM), s0)
        s1 = tl.dot(q1, half_of(low, 12, ASM), s1)
        s2 = tl.dot(q2, half_of(low, 48, ASM), s2)
        s3 = tl.dot(q3, half_of(low, 192, ASM), s3)
        s4 = tl.dot(q, half_of(high, 3, ASM), s4)
        s5 = tl.dot(q1, half_of(high, 12, ASM), s5)
        s6 = tl.dot(q2, half_of(high, 48, ASM), s6)
        s7 = tl.dot(q3, half_of(high, 192, ASM), s7)
    at_4 = start + 16 * n2
    for c in range(0, n4, BLOCK_C):
        inside = c + c0 < n4
        q = queries_of(scaled_ptr, g, n2 + c + c0, inside, BLOCK_D)
        q1 = q * 0.0625
        at = at_4[None, :] + (c + c0)[:, None] * 32
        mask = inside[:, None] & ok[None, :]
        low = tl.load(words_ptr + at, mask=mask, other=0)
        high = high_byte(low, ASM)
        s0 = tl.dot(q, half_of(low, 15, ASM), s0)
        s1 = tl.dot(q1, half_of(low, 240, ASM), s1)
        s2 = tl.dot(q, half_of(high, 15, ASM), s2)
        s3 = tl.dot(q1, half_of(high, 240, ASM), s3)
        low = tl.load(words_ptr + at + 16, mask=mask, other=0)
        high = high_byte(low, ASM)
        s4 = tl.dot(q, half_of(low, 15, ASM), s4)
        s5 = tl.dot(q1, half_of(low, 240, ASM), s5)
        s6 = tl.dot(q, half_of(high, 15, ASM), s6)
        s7 = tl.dot(q1, half_of(high, 240, ASM), s7)
    at_8 = start + 16 * (n2 + 2 * n4)
    for c in range(0, n8, BLOCK_C):
        inside = c + c0 < n8
        q = queries_of(scaled_ptr, g, n2 + n4 + c + c0, inside, BLOCK_D)
        at = at_8[None, :] + (c + c0)[:, None] * 64
        mask = inside[:, None] & ok[None, :]
        word = tl.load(words_ptr + at, mask=mask, other=0)
        s0 = tl.dot(q, half_of(word, 255, ASM), s0)
        s1 = tl.dot(q, half_of(high_byte(word, ASM), 255, ASM), s1)
        word = tl.load(words_ptr + at + 16, mask=mask, other=0)
        s2 = tl.dot(q, half_of(word, 255, ASM), s2)
        s3 = tl.dot(q, half_of(high_byte(word, ASM), 255, ASM), s3)
        word = tl.load(words_ptr + at + 32, mask=mask, other=0)
        s4 = tl.dot(q, half_of(word, 255, ASM), s4)
        s5 = tl.dot(q, half_of(high_byte(word, ASM), 255, ASM), s5)
        word = tl.load(words_ptr + at + 48, mask=mask, other=0)
        s6 = tl.dot(q, half_of(word, 255, ASM), s6)
        s7 = tl.dot(q, half_of(high_byte(word, ASM), 255, ASM), s7)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def side_by_side(s0, s1, s2, s3, s4, s5, s6, s7, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    """Eight `[BLOCK_G, BLOCK_N]` tiles as one `[BLOCK_G, 8 BLOCK_N]`: column 8 n + f is column n of s_f."""
    even = tl.join(tl.join(s0, s4), tl.join(s2, s6))
    odd = tl.join(tl.join(s1, s5), tl.join(s3, s7))
    return tl.reshape(tl.join(even, odd), [BLOCK_G, 8 * BLOCK_N])


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
        scale = tl.load(floats_ptr + scales + token, mask=ok, other=0.0).to(tl.float32) * norm
        minimum = tl.load(floats_ptr + minima + token, mask=ok, other=0.0).to(tl.float32)
        lowest += tl.sum(p * minimum[None, :], 1)
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
