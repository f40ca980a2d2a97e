"""What a kernel asks of memory: sectors of 32 bytes that its loads and stores touch, counted.

The kernel runs in Triton's interpreter, with its own tiles and masks. A load or store of one program counts
each sector that it touches once, so what a kernel reads twice counts twice, and two bytes that lie far from
all others count 64. `distinct` sectors are those that a launch touches at least once, however often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from triton.runtime import interpreter

SECTOR_BYTES = 32
"""A GPU's memory moves no less."""
_Sectors = NDArray[np.uint64]


@dataclass(kw_only=True)
class Traffic:
    """Of one kernel. Attributes: read_bytes, written_bytes: an atomic operation does both; distinct_bytes:
    read, summed over launches."""

    launches: int = 0
    programs: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    distinct_bytes: int = 0
    _of_launch: list[_Sectors] = field(default_factory=list, repr=False)

    def begin(self) -> None:
        """A launch begins."""
        self.launches += 1
        self._of_launch = []

    def end(self) -> None:
        """The launch has ended."""
        if self._of_launch:
            self.distinct_bytes += SECTOR_BYTES * len(np.unique(np.concatenate(self._of_launch)))
        self._of_launch = []

    def access(self, kind: str, pointers: Any, mask: Any, size: int) -> None:
        """One operation of one program. Args: kind: "load", "store" or "atomic"; size: bytes an element."""
        first = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)].astype(np.uint64)
        sectors = np.unique(first // np.uint64(SECTOR_BYTES))
        last = np.unique((first + np.uint64(size - 1)) // np.uint64(SECTOR_BYTES))
        if not np.array_equal(sectors, last):
            sectors = np.union1d(sectors, last)
        if kind != "store":
            self.read_bytes += SECTOR_BYTES * len(sectors)
            self._of_launch.append(sectors)
        if kind != "load":
            self.written_bytes += SECTOR_BYTES * len(sectors)


@contextmanager
def counted_traffic() -> Iterator[dict[str, Traffic]]:
    """Count what kernels do while they are interpreted, by kernel."""
    found: dict[str, Traffic] = {}
    running: list[Traffic] = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    load, store, rmw, cas = (getattr(builder, name) for name in names)
    call, grid_dim = executor.__call__, builder.set_grid_dim

    def counted_call(self: Any, *args: Any, **kwargs: Any) -> None:
        running.append(found.setdefault(self.fn.__name__, Traffic()))
        running[-1].begin()
        try:
            call(self, *args, **kwargs)
        finally:
            running.pop().end()

    def counted_grid(self: Any, *grid: int) -> None:
        running[-1].programs += int(np.prod(grid))
        grid_dim(self, *grid)

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        running[-1].access("load", pointers.data, mask.data, size)
        return load(self, pointers, mask, *rest, **named)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        running[-1].access("store", pointers.data, mask.data, value.data.dtype.itemsize)
        return store(self, pointers, value, mask, *rest, **named)

    def counted_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        running[-1].access("atomic", pointer.data, mask.data, value.data.dtype.itemsize)
        return rmw(self, operation, pointer, value, mask, *rest)

    def counted_cas(self: Any, pointer: Any, compared: Any, value: Any, *rest: Any) -> Any:
        running[-1].access("atomic", pointer.data, np.ones(1, dtype=bool), value.data.dtype.itemsize)
        return cas(self, pointer, compared, value, *rest)

    replaced = dict(zip(names, (counted_load, counted_store, counted_rmw, counted_cas), strict=True))
    for name, method in replaced.items():
        setattr(builder, name, method)
    executor.__call__, builder.set_grid_dim = counted_call, counted_grid
    try:
        yield found
    finally:
        for name, method in zip(names, (load, store, rmw, cas), strict=True):
            setattr(builder, name, method)
        executor.__call__, builder.set_grid_dim = call, grid_dim
