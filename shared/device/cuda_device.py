"""CUDA graphs for steps: one stream, and graphs that share one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from kvferry.kernels.quarantine import capturing
from kvferry.shared.device.step_device import StepDevice
from kvferry.shared.model.interface import LanguageModel

_DECODE_PRIORITY = -1
"""Above the default, 0, which prefill has."""


class CudaDevice(StepDevice):
    """A `StepDevice` with its own stream and with CUDA graphs that share one memory pool.

    Decode's programs go before those of a prefill in the same process, whose streams have no priority. A
    graph's programs have the priority of the stream on which they were captured.

    Graphs write their results to buffers allocated before capture, so they can reuse each other's scratch
    memory.
    """

    def __init__(
        self, device: torch.device, *, captures: bool = True, priority: int = _DECODE_PRIORITY
    ) -> None:
        self.captures = captures
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def scope(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def follow(self, written: torch.cuda.Event | None = None) -> None:
        """See `StepDevice.follow`; `written_so_far` says who writes where. Without a mark the steps'
        stream waits for all that the default stream has been given, other sequences' blocks included."""
        if written is None:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        else:
            self._stream.wait_event(written)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # compiles kernels, loads them, and lets libraries allocate their workspaces
        return self.capture_warm(run)

    def capture_warm(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with capturing:
            self._capture(graph, run)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        # Not torch.cuda.graph, which first synchronizes the device and empties the memory caches: new shapes
        # are captured while requests run. thread_local: other threads copy blocks into the arena.
        # Python must not collect garbage meanwhile: tensors and graphs that end make calls that break a
        # capture.
        was_enabled = gc.isenabled()
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            try:
                run()
            finally:
                graph.capture_end()
        except Exception:  # Triton's compiler has its own errors
            self._abandon(graph)
            raise
        finally:
            if was_enabled:
                gc.enable()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Clean up after a failed capture. Before version 2.12, torch's allocator then goes on using the
        graph's pool. That is ended here, and later captures use a new pool."""
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


def step_device(model: LanguageModel, *, priority: int = _DECODE_PRIORITY) -> StepDevice:
    """Return the step device for a model. Args: priority: of its stream."""
    if model.device.type != "cuda":
        return StepDevice()
    return CudaDevice(model.device, captures=model.num_ranks == 1, priority=priority)
