"""Copies of a layer's tensors on the host, made while the next layer computes.

Place in the request's path: between a layer's compression and its shipping and staging (`prompt_pass.py`). On
CUDA the thread computes on one stream of its own and copies to pinned memory on another, behind an event; on
a CPU there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

Arrived = Callable[[], tuple[Tensor, ...]]
"""Waits for copies and returns them."""


class HostCopies(Protocol):
    """One thread's copies.

    Attributes: layers_behind: layers that may be computed before the copies of one are asked for.
    """

    layers_behind: int

    def scope(self) -> AbstractContextManager[object]:
        """Where the thread computes: on the device, and behind nobody else's work."""
        ...

    def start(self, tensors: Sequence[Tensor]) -> Arrived:
        """Begin to copy what the device has been asked to compute. Nobody may change it meanwhile."""
        ...

    def settle(self) -> None:
        """Wait for what the device has been asked to compute; not for copies."""
        ...


class CpuCopies:
    """Implements `HostCopies` for tensors that are on the host: they are their own copies."""

    layers_behind = 0

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def start(self, tensors: Sequence[Tensor]) -> Arrived:
        return lambda: tuple(tensors)

    def settle(self) -> None:
        """Nothing runs behind."""


class PinnedCopies:
    """Implements `HostCopies` for CUDA."""

    layers_behind = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The default stream is others': the receiver's copies into the arena, and whoever waits for these.
        self._computing, self._stream = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

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
                    # its memory is not handed out again before the copy is made
                    tensor.record_stream(self._stream)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(self._stream)

        def wait() -> tuple[Tensor, ...]:
            arrived.synchronize()
            return tuple(copies)

        return wait

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def host_copies(device: torch.device) -> HostCopies:
    """Copies from the device that a model is on."""
    return PinnedCopies(device) if device.type == "cuda" else CpuCopies()
