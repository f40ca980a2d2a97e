"""The inline assembly that unpacks codes on a GPU equals the plain branch, by a model of its instructions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kvferry.kernels.trizone import codes
from kvferry.kernels.trizone.codes import high_byte, keys_of, unpacked, values_of

Words = NDArray[np.uint32]
ALL = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
MASKS = [3, 12, 48, 192, 15, 240, 255]


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """PTX: bit (a, b, c) of the result is that bit of the table."""
    out = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            chosen = [operand if i >> shift & 1 else ~operand for operand, shift in ((a, 2), (b, 1), (c, 0))]
            out |= chosen[0] & chosen[1] & chosen[2]
    return out


def _halves(words: Words) -> NDArray[np.float64]:
    return words.view(np.float16).astype(np.float64)


def _rounded(halves: NDArray[np.float64]) -> Words:
    return halves.astype(np.float16).view(np.uint32)


_INSTRUCTIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "shr.b32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "sub.rn.f16x2": lambda a, b: _rounded(_halves(a) - _halves(b)),
    "fma.rn.f16x2": lambda a, b, c: _rounded(_halves(a) * _halves(b) + _halves(c)),
}


def run(assembly: Any, *operands: Tensor) -> Tensor:
    """The assembly on two 16-bit words at a time, as `pack=2` gives them; of 32 bits there are two each."""
    registers: dict[str, Words] = {}
    for operand in operands:
        parts = [operand] if operand.dtype != torch.int32 else [operand[::2], operand[1::2]]
        for part in parts:
            registers[f"${len(registers) + 1}"] = part.contiguous().numpy().view(np.uint32)
    for line in filter(
        None, (part.strip(" {}") for part in str(getattr(assembly, "value", assembly)).split(";"))
    ):
        name, _, rest = line.partition(" ")
        if name == ".reg":
            continue
        target, *sources = re.split(r",\s*", rest)
        values = [
            registers[source] if source in registers else np.full_like(registers["$1"], int(source, 0))
            for source in sources
        ]
        registers[target] = _INSTRUCTIONS[name](*values)
    return torch.from_numpy(registers["$0"].view(np.int16).copy())


SCALE, MINIMUM = 0.25, -7.0
"""With these every code's value is a half."""


@triton.jit
def _values_kernel(word_ptr, value_ptr, high_ptr, scale, minimum, MASK: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = tl.load(word_ptr + i)
    scales = tl.full([BLOCK], scale, tl.float16)
    tl.store(value_ptr + i, values_of(words, scales, tl.full([BLOCK], minimum, tl.float16), MASK, False))
    tl.store(high_ptr + i, high_byte(words, False))


@pytest.mark.parametrize("mask", MASKS)
def test_every_word_s_value_is_that_of_the_plain_branch(mask: int) -> None:
    values, high = torch.empty(1 << 16, dtype=torch.float16), torch.empty_like(ALL)
    _values_kernel[(1,)](ALL, values, high, SCALE, MINIMUM, MASK=mask, BLOCK=1 << 16)
    expected = (ALL.int() & mask) // (mask & -mask) * SCALE + MINIMUM
    assert torch.equal(values.float(), expected)
    scales, minima = (torch.full((1 << 16,), number, dtype=torch.float16) for number in (SCALE, MINIMUM))
    assert torch.equal(run(codes._value_assembly(mask), ALL, scales, minima), values.view(torch.int16))
    # the high byte of the result is undefined
    assert torch.equal(run(codes._SHIFT, ALL) & 255, high & 255)


@triton.jit
def _keys_kernel(
    word_ptr, key_ptr, shift, mask, one, base, scale, minimum, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    shifts, masks = tl.full([BLOCK], shift, tl.int32), tl.full([BLOCK], mask, tl.int32)
    ones, bases = tl.full([BLOCK], one, tl.int32), tl.full([BLOCK], base, tl.float16)
    scales, minima = tl.full([BLOCK], scale, tl.float16), tl.full([BLOCK], minimum, tl.float16)
    tl.store(
        key_ptr + i, keys_of(tl.load(word_ptr + i), shifts, masks, ones, bases, scales, minima, False)
    )  # fmt: skip


@pytest.mark.parametrize(("width", "shift"), [(w, shift) for w in (2, 4, 8, 16) for shift in range(0, 16, w)])
def test_every_word_s_key_is_that_of_the_plain_branch(width: int, shift: int) -> None:
    if width == 16:
        # values as they are
        words, expected = ALL[ALL.view(torch.float16).isfinite()], None
        numbers = (0, (0xFFFF << 16 | 0xFFFF) - (1 << 32), 0, 0.0, 1.0, 0.0)
    else:
        words = ALL
        expected = ((ALL.int() >> shift) & ((1 << width) - 1)) * SCALE + MINIMUM
        numbers = (shift, ((1 << width) - 1) * 0x10001, 0x64006400, 1024.0, SCALE, MINIMUM)
    words = words[: len(words) // 1024 * 1024].contiguous()
    kinds = (*[torch.int32] * 3, *[torch.float16] * 3)
    operands = [
        torch.full((len(words),), number, dtype=kind) for number, kind in zip(numbers, kinds, strict=True)
    ]
    assembled = run(codes._KEYS, words, *operands).view(torch.float16)
    keys = torch.empty(1024, dtype=torch.float16)
    for start in range(0, len(words), 1024):
        part = slice(start, start + 1024)
        _keys_kernel[(1,)](words[part], keys, *numbers, BLOCK=1024)
        assert torch.equal(keys, assembled[part])
        assert torch.equal(keys, words[part].view(torch.float16) if expected is None else expected[part])


@triton.jit
def _unpack_kernel(word_ptr, value_ptr, WIDTH: tl.constexpr, COUNT: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, M)[:, None] * 256 + tl.arange(0, 256)[None, :]
    one, zero = tl.full([M, 256], 1.0, tl.float16), tl.full([M, 256], 0.0, tl.float16)
    values = unpacked(tl.load(word_ptr + at), one, zero, WIDTH, False)
    tl.store(value_ptr + at[:, :, None] * COUNT + tl.arange(0, COUNT)[None, None, :], values)


@pytest.mark.parametrize(("width", "count"), [(2, 8), (4, 4), (8, 2), (16, 1)])
def test_a_word_s_codes_are_in_their_order(width: int, count: int) -> None:
    result = torch.empty((1 << 16) * count, dtype=torch.float16)
    _unpack_kernel[(1,)](ALL, result, WIDTH=width, COUNT=count, M=256)
    if width == 16:
        assert torch.equal(result.view(torch.int16), ALL)
    else:
        shifts = torch.arange(count) * width
        expected = (ALL.int()[:, None] >> shifts) & ((1 << width) - 1)
        assert torch.equal(result, expected.flatten().half())
