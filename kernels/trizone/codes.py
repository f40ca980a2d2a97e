"""Words of codes as float16, without an integer-to-float conversion.

V, one width for all: `(word & mask) | 0x3C00` is the half `1 + code * 2^(shift - 10)`, code being the bits
under the mask: one integer instruction for a pair of codes; one more turns it into the code, exactly, and
one into the value. K, a width for each channel: `(word >> shift & mask) | 0x6400` is the half `1024 + code`.
In the interpreter, which has no inline assembly, plain integer operations do the same.

Order of codes: `kernels/packed/value_rows.py`, `key_words.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SHIFT = tl.constexpr("shr.b32 $0, $1, 8;")
_KEYS = tl.constexpr(
    "{ .reg .b32 t; shr.b32 t, $1, $2; lop3.b32 t, t, $4, $6, 0xEA; sub.rn.f16x2 t, t, $8; "
    "fma.rn.f16x2 $0, t, $9, $10; }"
)
"""For two words, 32-bit operands being there twice: 0xEA is (a & b) | c."""


@triton.constexpr_function
def _unit_of(mask):
    """Return the factor that brings the mask's lowest bit from 2^(shift - 10) to 1."""
    return float(1024 // (mask & -mask))


@triton.constexpr_function
def _value_assembly(mask):
    """Return assembly for two words: 1006648320 is 0x3C003C00, two halves of 1; u and v are two of `_unit_of`
    and of its negative."""
    lowest = mask & -mask
    unit = (26 - lowest.bit_length()) << 10
    return (
        f"{{ .reg .b32 t, u, v; lop3.b32 t, $1, {mask << 16 | mask}, 1006648320, 0xEA; "
        f"mov.b32 u, {unit << 16 | unit}; mov.b32 v, {(unit | 1 << 15) << 16 | unit | 1 << 15}; "
        "fma.rn.f16x2 t, t, u, v; fma.rn.f16x2 $0, t, $2, $3; }"
    )


@triton.jit
def high_byte(words, ASM: tl.constexpr):
    """Return each word's high byte in its low byte; the high byte is undefined."""
    if ASM:
        return tl.inline_asm_elementwise(_SHIFT, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    else:
        return words >> 8


@triton.jit
def values_of(words, scale, minimum, MASK: tl.constexpr, ASM: tl.constexpr):
    """Return `code * scale + minimum` in float16, the code being under MASK, in the low byte of int16 words.

    Args: all `[M, N]`, scale and minimum float16.
    """
    UNIT: tl.constexpr = _unit_of(MASK)
    if ASM:
        value = tl.inline_asm_elementwise(
            _value_assembly(MASK), "=r,r,r,r", [words, scale, minimum], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        half = ((words & MASK) | 0x3C00).to(tl.int16).to(tl.float16, bitcast=True)
        value = _scaled(half * UNIT - UNIT, scale, minimum)
    return value


@triton.jit
def _scaled(code, scale, minimum):
    return (code.to(tl.float32) * scale.to(tl.float32) + minimum.to(tl.float32)).to(tl.float16)


@triton.jit
def keys_of(words, shift, mask, one, base, scale, minimum, ASM: tl.constexpr):
    """Return `code * scale + minimum` in float16, the code being the bits of int16 words above `shift`.

    Args: all of the words' shape, their rows constant. shift: int32; mask, one: int32, the same 16 bits
        twice; base: float16, the half that `one` is; scale, minimum: float16.
    """
    if ASM:
        key = tl.inline_asm_elementwise(
            _KEYS, "=r,r,r,r,r,r,r,r,r,r,r", [words, shift, mask, one, base, scale, minimum],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        half = ((words.to(tl.int32) >> shift) & mask) | one
        code = half.to(tl.int16).to(tl.float16, bitcast=True) - base
        key = _scaled(code, scale, minimum)
    return key


@triton.jit
def _four_values(words, scale, minimum, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """Return the values of the four lowest codes in their order: `[M, N, 4]`."""
    if WIDTH == 2:
        even = tl.join(values_of(words, scale, minimum, 3, ASM), values_of(words, scale, minimum, 48, ASM))
        odd = tl.join(values_of(words, scale, minimum, 12, ASM), values_of(words, scale, minimum, 192, ASM))
    else:
        high = high_byte(words, ASM)
        even = tl.join(values_of(words, scale, minimum, 15, ASM), values_of(high, scale, minimum, 15, ASM))
        odd = tl.join(values_of(words, scale, minimum, 240, ASM), values_of(high, scale, minimum, 240, ASM))
    return tl.reshape(tl.join(even, odd), [words.shape[0], words.shape[1], 4])


@triton.jit
def unpacked(words, scale, minimum, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """Unpack int16 words `[M, N]` to float16 `[M, N, 16 / WIDTH]`: the values of each word's codes in their
    order.

    A word of width 16 is the float16 value itself. Args: scale, minimum: float16 `[M, N]`.
    """
    if WIDTH == 16:
        values = tl.expand_dims(words.to(tl.float16, bitcast=True), 2)
    elif WIDTH == 8:
        high = high_byte(words, ASM)
        values = tl.join(
            values_of(words, scale, minimum, 255, ASM), values_of(high, scale, minimum, 255, ASM)
        )
    elif WIDTH == 4:
        values = _four_values(words, scale, minimum, WIDTH, ASM)
    else:
        high = high_byte(words, ASM)
        both = tl.join(
            _four_values(words, scale, minimum, WIDTH, ASM), _four_values(high, scale, minimum, WIDTH, ASM)
        )
        values = tl.reshape(tl.trans(both, 0, 1, 3, 2), [words.shape[0], words.shape[1], 8])
    return values
