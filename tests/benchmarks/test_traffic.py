"""What `benchmarks/gpu/traffic.py` counts of small kernels whose traffic is known."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kvferry.kernels import dispatch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(not dispatch.interpreting(), reason="kernels are not interpreted")


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("traffic")
    sys.modules.pop("traffic", None)


@triton.jit
def _copy_kernel(from_ptr, to_ptr, n, TIMES: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(TIMES):
        total += tl.load(from_ptr + at * STRIDE, mask=at < n, other=0.0)
    tl.store(to_ptr + at, total, mask=at < n)


@triton.jit
def _count_kernel(counter_ptr):
    tl.atomic_add(counter_ptr, 1)


def counts(traffic: Any, *, n: int, times: int = 1, stride: int = 1) -> Any:
    # an allocation begins at a sector
    source, target = torch.zeros(n * stride), torch.zeros(n)
    with traffic.counted_traffic() as found:
        _copy_kernel[(triton.cdiv(n, 64),)](source, target, n, TIMES=times, STRIDE=stride, BLOCK=64)
    return found["_copy_kernel"]


def test_each_byte_of_a_copy_counts_once(traffic: Any) -> None:
    found = counts(traffic, n=256)
    assert (found.launches, found.programs) == (1, 4)
    assert (found.read_bytes, found.written_bytes, found.distinct_bytes) == (1024, 1024, 1024)


def test_what_is_read_twice_counts_twice_but_is_distinct_once(traffic: Any) -> None:
    found = counts(traffic, n=256, times=2)
    assert (found.read_bytes, found.written_bytes, found.distinct_bytes) == (2048, 1024, 1024)


def test_numbers_that_lie_apart_take_a_sector_each(traffic: Any) -> None:
    assert counts(traffic, n=64, stride=8).read_bytes == 64 * 32
    assert counts(traffic, n=64, stride=2).read_bytes == 64 * 8


def test_masked_elements_take_nothing_and_an_atomic_reads_and_writes(traffic: Any) -> None:
    assert counts(traffic, n=8).read_bytes == 32
    counter = torch.zeros(1, dtype=torch.int32)
    with traffic.counted_traffic() as found:
        _count_kernel[(3,)](counter)
    assert int(counter) == 3
    assert (found["_count_kernel"].read_bytes, found["_count_kernel"].written_bytes) == (96, 96)


def test_the_interpreter_is_as_before_afterwards(traffic: Any) -> None:
    with traffic.counted_traffic() as found:
        pass
    counts(traffic, n=64)
    assert not found
