"""The guard finds what it is there for, so a guarded test that passes means something."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kvtest.triton_guard import GuardError, guarded
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.runtime.interpreter import InterpreterError


@pytest.fixture(autouse=True)
def guard() -> None:
    """Instead of the folder's: these tests have their own."""


@triton.jit
def _copy_kernel(source_ptr, target_ptr, size, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + i, tl.load(source_ptr + i + shift, mask=i < size, other=0.0), mask=i < size)


@triton.jit
def _number_kernel(target_ptr, next_ptr):
    tl.store(target_ptr + tl.program_id(0), tl.atomic_add(next_ptr, 1))


@triton.jit
def _same_place_kernel(target_ptr):
    tl.store(target_ptr, tl.program_id(0))


def test_accesses_inside_tensors_pass_and_are_counted() -> None:
    source, target = torch.arange(20.0), torch.zeros(20)
    with guarded(seed=0) as guard:
        _copy_kernel[(3,)](source, target, 20, 0, BLOCK=8)
    assert torch.equal(source, target)
    assert (guard.num_launches, guard.num_elements) == (1, 40)


def test_a_load_outside_every_tensor_is_named_with_its_line() -> None:
    source, target = torch.zeros(20), torch.zeros(20)
    with (
        pytest.raises(GuardError, match=r"_copy_kernel: load of 8 elements .* at test_triton_guard.py:\d+"),
        guarded(seed=0),
        pytest.raises(InterpreterError, match="outside any tensor"),
    ):
        _copy_kernel[(3,)](source, target, 20, 1 << 40, BLOCK=8)


def test_a_load_from_a_tensor_that_is_no_argument_passes_beside_tensors_without_memory() -> None:
    with FakeTensorMode():
        fake = torch.zeros(20)
    source, other, target = torch.zeros(20), torch.arange(20.0), torch.zeros(20)
    shift = (other.data_ptr() - source.data_ptr()) // source.element_size()
    with guarded(seed=0):
        _copy_kernel[(3,)](source, target, 20, shift, BLOCK=8)
    assert torch.equal(other, target)
    assert isinstance(fake, FakeTensor)


def test_two_programs_that_store_to_one_place_are_found() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(GuardError, match="store the same 4 bytes"), guarded(seed=0):
        _same_place_kernel[(2,)](target)


def test_programs_run_in_the_order_of_the_seed() -> None:
    def order(seed: int) -> list[int]:
        target, following = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with guarded(seed):
            _number_kernel[(8,)](target, following)
        return target.tolist()

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(8))


def test_new_memory_is_filled_for_the_length_of_the_context() -> None:
    with guarded(seed=0):
        assert torch.empty(100).isnan().all()
        assert torch.empty_like(torch.zeros(5)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
