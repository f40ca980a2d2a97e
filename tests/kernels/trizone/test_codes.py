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
from kvferry.kernels.trizone.codes import code_of, high_byte, unpacked

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


_INSTRUCTIONS: dict[str, Any] = {
    "shr.b32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
}


def run(assembly: Any, words: Tensor) -> Tensor:
    """The assembly on two 16-bit words at a time, as `pack=2` gives them."""
    registers: dict[str, Words] = {"$1": words.numpy().view(np.uint32)}
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


@triton.jit
def _plain_kernel(word_ptr, code_ptr, high_ptr, MASK: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = tl.load(word_ptr + i)
    tl.store(code_ptr + i, code_of(words, MASK, False))
    tl.store(high_ptr + i, high_byte(words, False))


@pytest.mark.parametrize("mask", MASKS)
def test_every_word_s_code_is_that_of_the_plain_branch(mask: int) -> None:
    unpacked_codes = torch.empty(1 << 16, dtype=torch.float16)
    high = torch.empty_like(ALL)
    _plain_kernel[(1,)](ALL, unpacked_codes, high, MASK=mask, BLOCK=1 << 16)
    lowest = mask & -mask
    expected = (ALL.int() & mask) // lowest
    assert torch.equal(unpacked_codes.float(), expected.float())
    halves = run(codes._half_assembly(mask), ALL).view(torch.float16).float()
    assert torch.equal(halves, 1 + expected * lowest / 1024)
    # the high byte of the result is undefined
    assert torch.equal(run(codes._SHIFT, ALL) & 255, high & 255)


@triton.jit
def _unpack_kernel(word_ptr, code_ptr, WIDTH: tl.constexpr, COUNT: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, M)[:, None] * 256 + tl.arange(0, 256)[None, :]
    codes = unpacked(tl.load(word_ptr + at), WIDTH, False)
    tl.store(code_ptr + at[:, :, None] * COUNT + tl.arange(0, COUNT)[None, None, :], codes)


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
