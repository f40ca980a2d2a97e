"""A guard for kernels in Triton's interpreter, which has no memory protection and runs programs in order.

With it a kernel fails a test that reads or writes outside the tensors that are alive, whose programs write
the same bytes, that needs its programs in one order, or that reads memory nobody wrote.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

from kvtest import fast_interpreter

_OWN_FILES = (str(Path(triton.__file__).parent), __file__, fast_interpreter.__file__)
Addresses = NDArray[np.uint64]
_PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors with memory of their own; other classes wrap some of these, or stand for none."""


class GuardError(AssertionError):
    """A kernel accessed memory that it must not access."""


@contextmanager
def guarded(seed: int) -> Iterator[Guard]:
    """Guard every launch in the context.

    Every load, store and atomic operation must be inside the storage of a live CPU tensor, at a multiple of
    the element's size. Programs run in an order drawn from the seed. Two programs of a launch must not store
    to the same byte. `torch.empty` is filled with NaN, or the largest integer.

    Raises:
        GuardError: at the end, for everything found, even if code under test swallowed the error; the faulty
            access itself is not made, and raises `interpreter.InterpreterError` from the launch.
    """
    guard = Guard(seed)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # only deterministic mode fills new memory
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch:
        _patch_interpreter(patch, guard)
        try:
            yield guard
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
    if guard.faults:
        raise GuardError("\n".join(guard.faults))


class Guard:
    """What `guarded` has seen.

    Attributes:
        faults: one line each, at most one of a kind and launch.
        num_launches, num_elements: launches, and elements that they accessed.
        kernels: the names of the kernels launched.
        loaded: bytes of the watched tensor that each program of a kernel loaded.
    """

    def __init__(self, seed: int) -> None:
        self.faults: list[str] = []
        self.num_launches = self.num_elements = 0
        self.kernels: set[str] = set()
        self._watched = range(0)
        self.loaded: Counter[tuple[str, tuple[int, int, int]]] = Counter()
        self._random = random.Random(seed)
        self._launch: _Launch | None = None

    def watch(self, tensor: Tensor) -> None:
        """Count loads from a tensor's storage from now on."""
        storage = tensor.untyped_storage()
        self._watched = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        self.loaded.clear()

    def begin(self, kernel: str, arguments: Iterable[Any]) -> None:
        """A launch begins."""
        self.num_launches += 1
        self.kernels.add(kernel)
        self._launch = _Launch(kernel, [a for a in arguments if isinstance(a, Tensor)])

    def end(self) -> None:
        """A launch has ended without an error."""
        launch, self._launch = self._launch, None
        assert launch is not None
        if conflict := launch.conflict():
            self._fail(conflict)

    def order(self, grid: tuple[int, int, int]) -> None:
        """The launch's grid is known."""
        programs = list(np.ndindex(*grid))
        self._random.shuffle(programs)
        self._current().order = dict(zip(np.ndindex(*grid), programs, strict=True))

    def program(self, turn: tuple[int, int, int]) -> tuple[int, int, int]:
        """The program that runs instead of the one whose turn it is."""
        launch = self._current()
        launch.program = launch.order[turn]
        return launch.program

    def access(self, kind: str, pointers: Addresses, mask: NDArray[np.bool_], size: int) -> None:
        """Check one operation. Args: kind: "load", "store" or "atomic"; size: bytes an element."""
        launch = self._current()
        addresses = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)].astype(np.uint64)
        self.num_elements += addresses.size
        outside = launch.outside(addresses, size)
        if outside:
            self._fail(f"{launch.kernel}: {kind} of {outside} elements outside any tensor, at {_place()}")
        if (addresses % np.uint64(size)).any():
            self._fail(f"{launch.kernel}: misaligned {kind} of {size} bytes, at {_place()}")
        if kind == "load" and len(self._watched):
            inside = (addresses >= self._watched.start) & (addresses < self._watched.stop)
            self.loaded[launch.kernel, launch.program] += size * int(inside.sum())
        if kind == "store" and addresses.size:
            launch.stores.append((addresses, size, launch.program, _place()))

    def _current(self) -> _Launch:
        assert self._launch is not None, "no launch is in progress"
        return self._launch

    def _fail(self, fault: str) -> None:
        self.faults.append(fault)
        raise GuardError(fault)


class _Launch:
    """One launch.

    Attributes:
        order: the program to run at each place of the grid.
        program: the one that is running.
        stores: addresses, bytes an element, program and source line of each store.
    """

    def __init__(self, kernel: str, arguments: list[Tensor]) -> None:
        self.kernel = kernel
        self.order: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.program: Any = (0, 0, 0)
        self.stores: list[tuple[Addresses, int, tuple[int, int, int], str]] = []
        self._own = _ranges(arguments)
        self._alive: tuple[Addresses, Addresses] | None = None

    def outside(self, addresses: Addresses, size: int) -> int:
        """How many elements are outside all live tensors."""
        others = addresses[~_inside(addresses, size, *self._own)]
        if not others.size:
            return 0
        # descriptors may lead from one buffer to another; few launches do, and the search is slow
        if self._alive is None:
            self._alive = _ranges(o for o in gc.get_objects() if type(o) in _PLAIN)
        return int((~_inside(others, size, *self._alive)).sum())

    def conflict(self) -> str | None:
        """The first byte that two programs stored, in words."""
        if not self.stores:
            return None
        stored, writers = [], []
        for number, (addresses, size, _, _) in enumerate(self.stores):
            once = np.unique(addresses)
            stored.append((once[:, None] + np.arange(size, dtype=np.uint64)).ravel())
            writers.append(np.full(stored[-1].size, number))
        addresses, writer = np.concatenate(stored), np.concatenate(writers)
        order = np.argsort(addresses, kind="stable")
        addresses, writer = addresses[order], writer[order]
        programs = np.unique([store[2] for store in self.stores], axis=0, return_inverse=True)[1].ravel()
        program = programs[writer]
        twice = (addresses[1:] == addresses[:-1]) & (program[1:] != program[:-1])
        if not twice.any():
            return None
        first = int(np.flatnonzero(twice)[0])
        one, other = (self.stores[writer[i]] for i in (first, first + 1))
        return (
            f"{self.kernel}: programs {one[2]} and {other[2]} store the same {int(twice.sum())} bytes, "
            f"at {one[3]} and {other[3]}"
        )


def _patch_interpreter(patch: pytest.MonkeyPatch, guard: Guard) -> None:
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    call, grid_dim, grid_idx = executor.__call__, builder.set_grid_dim, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store
    cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw

    def guarded_call(self: Any, *args: Any, **kwargs: Any) -> None:
        guard.begin(self.fn.__name__, (*args, *kwargs.values()))
        call(self, *args, **kwargs)
        guard.end()

    def guarded_grid(self: Any, *grid: int) -> None:
        guard.order((grid[0], grid[1], grid[2]))
        grid_dim(self, *grid)

    def guarded_index(self: Any, *turn: int) -> None:
        grid_idx(self, *guard.program((turn[0], turn[1], turn[2])))

    def guarded_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        guard.access("load", pointers.data, mask.data, size)
        return load(self, pointers, mask, *rest, **named)

    def guarded_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        guard.access("store", pointers.data, mask.data, value.data.dtype.itemsize)
        return store(self, pointers, value, mask, *rest, **named)

    def guarded_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        guard.access("atomic", pointer.data, mask.data, value.data.dtype.itemsize)
        return rmw(self, operation, pointer, value, mask, *rest)

    def guarded_cas(self: Any, pointer: Any, compared: Any, value: Any, *rest: Any) -> Any:
        guard.access("atomic", pointer.data, np.ones(1, dtype=bool), value.data.dtype.itemsize)
        return cas(self, pointer, compared, value, *rest)

    patch.setattr(executor, "__call__", guarded_call)
    patch.setattr(builder, "set_grid_dim", guarded_grid)
    patch.setattr(builder, "set_grid_idx", guarded_index)
    patch.setattr(builder, "create_masked_load", guarded_load)
    patch.setattr(builder, "create_masked_store", guarded_store)
    patch.setattr(builder, "create_atomic_rmw", guarded_rmw)
    patch.setattr(builder, "create_atomic_cas", guarded_cas)


def _ranges(tensors: Iterable[Tensor]) -> tuple[Addresses, Addresses]:
    """First bytes, and bytes after the last, of the storages on the CPU: ascending, without overlap."""
    found = set()
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    joined: list[list[int]] = []
    for start, stop in sorted(found):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    pairs = np.array(joined, dtype=np.uint64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _inside(addresses: Addresses, size: int, starts: Addresses, stops: Addresses) -> NDArray[np.bool_]:
    if not starts.size:
        return np.zeros(addresses.shape, dtype=bool)
    before = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    inside: NDArray[np.bool_] = (before >= 0) & (addresses + np.uint64(size) <= stops[np.maximum(before, 0)])
    return inside


def _place() -> str:
    """File and line of the kernel's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
