"""What running steps needs of a device: an order among threads, capture, and values fetched without waiting.

`step_runner.py` speaks to this alone; everything that is CUDA's about a step is in `CudaDevice`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import torch
from torch import Tensor


class StepDevice(Protocol):
    """Where steps run, one thread's.

    Attributes: captures: whether `capture` is worth calling.
    """

    captures: bool

    def scope(self) -> AbstractContextManager[object]:
        """Whatever the device is asked inside goes one after the other."""
        ...

    def follow(self) -> None:
        """What comes next in the scope sees what other threads have written until now."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats `run`'s work on the device without its Python, which is run now and changes nothing.

        Raises: RuntimeError: it cannot be captured.
        """
        ...

    def fetch(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Callable[[], bool]]:
        """Copies on the host, and what tells whether they have arrived. Does not wait."""
        ...


class CpuDevice:
    """Implements `StepDevice` where a step is over when its function returns."""

    captures = False

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def follow(self) -> None:
        """Nothing to wait for."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def fetch(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Callable[[], bool]]:
        return tuple(tensor.clone() for tensor in tensors), lambda: True


class CudaDevice:
    """Implements `StepDevice` by a stream of its own and CUDA graphs that share one pool of memory.

    A graph's results are in buffers made before it, so that graphs may use each other's scratch memory.
    """

    captures = True
    _WARM_UP_RUNS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def scope(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # compiles kernels, and lets libraries allocate what they keep
        for _ in range(self._WARM_UP_RUNS):
            run()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which waits for the whole device and empties every cache of memory first: new
        # shapes come while requests are served. thread_local: other threads copy blocks into the arena.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            try:
                run()
            finally:
                graph.capture_end()
        except RuntimeError:
            self._abandon(graph)
            raise
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a failed capture: torch before 2.12 leaves the allocator believing that it goes on, filling
        the pool by what the graph says. That is ended here; later captures fill another pool."""
        self._failed.append(graph)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def fetch(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Callable[[], bool]]:
        host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
        for target, tensor in zip(host, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(self._stream)
        return host, arrived.query


def step_device(device: torch.device) -> StepDevice:
    """The device that a model is on."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()
