"""Codes to float16 without a conversion instruction: one integer instruction for a pair of codes.

`(word & mask) | 0x3C00` is the half `1 + code * 2^(shift - 10)`, code being the bits under the mask. The "1"
is taken off again by a bias (K: at most D channels are summed) or by one subtraction, which is exact (V: all
tokens are summed, and a bias would lose ten of the sum's bits). In the interpreter, which has no inline
assembly, plain integer operations do the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
