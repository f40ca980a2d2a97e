"""The K side of TriZone's packed zones: logits of a tile of token blocks.

Order of codes: `kernels/packed/key_words.py`. A tile is BLOCK_N / 16 token blocks of 128: words `[BLOCK_C,
BLOCK_N]`, 8 tokens per lane; so there are eight logit tiles `[BLOCK_G, BLOCK_N]`, of tokens
f * lanes + lane of each block, f = 0 .. 7.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.trizone.scaled_queries import queries_of
from kvferry.kernels.trizone.unpack import half_of, high_byte


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
