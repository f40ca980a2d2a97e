"""Products in C against float64: any shape, dtype and number of threads, and each token as if alone."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kvferry.kernels.native.library import KINDS, Product, has_halves, is_available, library

pytestmark = pytest.mark.skipif(not is_available(), reason="this machine has no C compiler")

LARGE = (24 * 50 + 7, 4096 + 520)
"""Rows and columns of a product that several threads share, in blocks of columns."""


def make(rows: int, columns: int, dtype: torch.dtype, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    return weight, torch.randn(rows, generator=generator) if has_bias else None


def tokens_of(number: int, columns: int) -> Tensor:
    return torch.randn(number, columns, generator=torch.Generator().manual_seed(number))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, threads: int) -> Tensor:
    """In memory between NaN, which nothing may change."""
    around = torch.full((len(x) + 2, len(weight)), torch.nan)
    y = around[1:-1]
    bias_at = None if bias is None else bias.data_ptr()
    product = Product(weight.data_ptr(), bias_at, *weight.shape, KINDS[weight.dtype])
    library().kvferry_multiply(ctypes.addressof(product), len(x), threads, x.data_ptr(), y.data_ptr())
    assert around[[0, -1]].isnan().all()
    return y


def expected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    products = x.double() @ weight.double().T
    return (products if bias is None else products + bias.double()).float()


def skip_without(dtype: torch.dtype) -> None:
    if dtype == torch.float16 and not has_halves():
        pytest.skip("this machine does not read float16")


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("num_tokens", [*range(1, 10), 17, 40])
@pytest.mark.parametrize("rows", [1, 3, 24, 97, 200])
@pytest.mark.parametrize("columns", [8, 16, 24, 520, 1032])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_wide_numbers(
    dtype: torch.dtype, num_tokens: int, rows: int, columns: int, has_bias: bool
) -> None:
    skip_without(dtype)
    weight, bias = make(rows, columns, dtype, has_bias=has_bias)
    x = tokens_of(num_tokens, columns)
    torch.testing.assert_close(
        multiply(x, weight, bias, 1), expected(x, weight, bias), rtol=1e-5, atol=1e-5 * columns**0.5
    )


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_number_of_threads_and_of_tokens_changes_no_bit(dtype: torch.dtype) -> None:
    skip_without(dtype)
    weight, bias = make(*LARGE, dtype, has_bias=True)
    x = tokens_of(21, LARGE[1])
    y = multiply(x, weight, bias, 1)
    torch.testing.assert_close(y, expected(x, weight, bias), rtol=1e-4, atol=1e-3)
    for threads in (2, 3, 7, 1000):
        assert torch.equal(multiply(x, weight, bias, threads), y)
    for number in range(1, 10):
        assert torch.equal(multiply(x[4 : 4 + number], weight, bias, 2), y[4 : 4 + number])


def test_a_token_that_is_not_a_number_spoils_no_other() -> None:
    weight, bias = make(*LARGE, torch.bfloat16, has_bias=False)
    x = tokens_of(8, LARGE[1])
    clean = multiply(x, weight, bias, 2)
    x[3, 700] = torch.nan
    y = multiply(x, weight, bias, 2)
    assert y[3].isnan().all()
    others = [number for number in range(8) if number != 3]
    assert torch.equal(y[others], clean[others])


def test_callers_at_the_same_time_share_the_threads() -> None:
    weight, bias = make(*LARGE, torch.bfloat16, has_bias=True)
    inputs = [tokens_of(number, LARGE[1]) for number in range(1, 9)]
    alone = [multiply(x, weight, bias, 1) for x in inputs]
    with ThreadPoolExecutor(20) as callers:  # more than the pool has desks
        for _ in range(5):
            together = list(callers.map(lambda x: multiply(x, weight, bias, 3), inputs * 3))
            assert all(map(torch.equal, together, alone * 3))


def test_a_child_process_has_threads_of_its_own() -> None:
    script = """
import ctypes, os, torch
from kvferry.kernels.native.library import KINDS, Product, library

weight, x = torch.ones(4096, 1024), torch.ones(2, 1024)

def is_right():
    y = torch.zeros(2, 4096)
    product = Product(weight.data_ptr(), None, *weight.shape, KINDS[weight.dtype])
    library().kvferry_multiply(ctypes.addressof(product), 2, 4, x.data_ptr(), y.data_ptr())
    return bool((y == 1024).all())

def threads():
    return set(os.listdir("/proc/self/task"))

before = threads()  # some of them other libraries', which may end theirs at a fork
assert is_right()
own = threads() - before
assert len(own) == 3
child = os.fork()
if child == 0:
    os._exit(0 if len(threads()) == 1 and is_right() and len(threads()) == 4 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert is_right() and threads() - before == own
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("threads are counted in /proc")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
