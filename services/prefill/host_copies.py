"""Copies a layer's tensors to the host while the next layer is computed.

Place in the request's path: between a layer's compression and its shipping and staging (`prompt_pass.py`). On
CUDA the thread computes on its own stream and copies to pinned memory on a second one, which waits for the
first. On a CPU there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_OPERATIONS_AHEAD = 8

Arrived = Callable[[], tuple[Tensor, ...]]
"""Waits for copies and returns them."""
Elapsed = Callable[[], float]
"""Waits for the end of what was timed and returns its seconds."""


class HostCopies:
    """One thread's copies. This class serves tensors on the host, which it returns as they are.

    Attributes: layers_behind: how many layers the copies may lag behind the computation.
    """

    layers_behind = 0

    def scope(self) -> AbstractContextManager[object]:
        """The context in which the thread computes; on CUDA, its own stream."""
        return nullcontext()

    def start(self, tensors: Sequence[Tensor]) -> Arrived:
        """Begin to copy tensors, computed or still queued. They must not change until the copies are done."""
        return lambda: tuple(tensors)

    def time(self, clock: Callable[[], float]) -> Callable[[], Elapsed]:
        """Begin to time what is computed from now on; the result ends that, and waits for nothing.

        Args: clock: seconds of the thread.
        """
        begin_s = clock()

        def end() -> Elapsed:
            elapsed_s = clock() - begin_s
            return lambda: elapsed_s

        return end

    def pace(self) -> None:
        """Called between operations of a long pass: wait until the device has few of them left to do, so that
        the next ones, which may be another prompt's, begin soon."""


class PinnedCopies(HostCopies):
    """Copies from CUDA to pinned memory."""

    layers_behind = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not the default stream: decode's receiver copies into the arena on it, and decode waits for that.
        self._computing, self._stream = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._num_operations = 0
        self._earlier = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def scope(self) -> AbstractContextManager[object]:
        self._computing.wait_stream(torch.cuda.default_stream(self._device))
        return torch.cuda.stream(self._computing)

    def start(self, tensors: Sequence[Tensor]) -> Arrived:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = []
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                copies.append(copy.copy_(tensor, non_blocking=True))
                if tensor.is_cuda:
                    # Its memory must not be reused before the copy is done.
                    tensor.record_stream(self._stream)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(self._stream)

        def wait() -> tuple[Tensor, ...]:
            arrived.synchronize()
            return tuple(copies)

        return wait

    def time(self, clock: Callable[[], float]) -> Callable[[], Elapsed]:
        begin = self._timed_event()

        def end() -> Elapsed:
            done = self._timed_event()

            def elapsed_s() -> float:
                done.synchronize()
                return float(begin.elapsed_time(done)) / 1000

            return elapsed_s

        return end

    def _timed_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def pace(self) -> None:
        self._num_operations += 1
        if self._num_operations % _OPERATIONS_AHEAD == 0:
            self._earlier.synchronize()
            self._earlier = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._earlier.record(torch.cuda.current_stream(self._device))


def host_copies(device: torch.device) -> HostCopies:
    """Host copies for a model's device."""
    return PinnedCopies(device) if device.type == "cuda" else HostCopies()
