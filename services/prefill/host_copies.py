"""Moves layers from the engine's thread to the sender, and history to the device.

Place in the request's path: between a layer's compression and the sender and the history store
(`prompt_pass.py`). Its tensors are copied to the host while the next layer is computed (`HostCopies`);
another thread then stages, encodes and sends them (`HandOver`), so that it waits for the copy and for room
in the send buffer, and the engine does not. On CUDA the engine computes on its own stream and copies to
pinned memory on a second one, which waits for the first; history is copied on a third. On a CPU there is
nothing to copy.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from kvferry.shared.process.heartbeat import Heartbeat

_OPERATIONS_AHEAD = 8

Arrived = Callable[[], tuple[Tensor, ...]]
"""Waits for copies and returns them."""
Elapsed = Callable[[], float]
"""Waits for the end of what was timed and returns its seconds."""


class HostCopies:
    """One thread's copies. This class serves tensors on the host, which it returns as they are."""

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which the thread computes; on CUDA, its own stream."""
        return nullcontext()

    def start(self, tensors: Sequence[Tensor]) -> Arrived:
        """Begin to copy tensors, computed or still queued. They must not change until the copies are done."""
        return lambda: tuple(tensors)

    def upload(self, tensors: Sequence[Tensor]) -> Arrived:
        """Begin to copy tensors from the host to the device. Any thread may call it. The result is for the
        thread that computes: its stream waits for the copies, and the thread does not."""
        return lambda: tuple(tensors)

    def time(self, clock: Callable[[], float]) -> Callable[[], Elapsed]:
        """Begin to time what is computed from now on. Calling the result ends the timing, without waiting.

        Args: clock: seconds of the thread.
        """
        begin_s = clock()

        def end() -> Elapsed:
            elapsed_s = clock() - begin_s
            return lambda: elapsed_s

        return end

    def pace(self) -> None:
        """Wait between operations of a long pass until the device has few of them left, so that the next
        ones, which may be another prompt's, begin soon."""

    def has_room(self, size_bytes: int) -> bool:
        """Return whether this many bytes can stay on the device beside what a pass needs."""
        return True


class PinnedCopies(HostCopies):
    """Copies from CUDA to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not the default stream: decode's receiver copies into the arena on it, and decode waits for that.
        # All have the default priority, below that of decode's stream.
        streams = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        self._computing, self._stream, self._uploading = streams
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

    def upload(self, tensors: Sequence[Tensor]) -> Arrived:
        with torch.cuda.stream(self._uploading):
            copies = tuple(tensor.pin_memory().to(self._device, non_blocking=True) for tensor in tensors)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(self._uploading)

        def take() -> tuple[Tensor, ...]:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrived)
            for copy in copies:
                # Its memory belongs to the stream that copied.
                copy.record_stream(stream)
            return copies

        return take

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

    def has_room(self, size_bytes: int) -> bool:
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        kept_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return size_bytes <= free_bytes + kept_bytes

    def pace(self) -> None:
        self._num_operations += 1
        if self._num_operations % _OPERATIONS_AHEAD == 0:
            self._earlier.synchronize()
            self._earlier = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._earlier.record(torch.cuda.current_stream(self._device))


def host_copies(device: torch.device) -> HostCopies:
    return PinnedCopies(device) if device.type == "cuda" else HostCopies()


class HandOver:
    """One pass's layers, in order. Used by the engine's thread.

        put: layer k ──► wait for layer k - 1 ──► layer k runs on the pool while k + 1 is computed
        settle ──► wait for the last one;  left without it, as by an error ──► what has not begun does not run

    So one layer that is computed and one that is handed over are alive. An error of the work is raised by the
    next `put` or `settle`, as it was raised there. Waiting ends by itself: the work's waits have time limits,
    and aborting the transfer ends them.

    Attributes: work: what the next layer needs done.

    Args:
        pool: a thread at least for each pass at the same time.
        heartbeat: told of waits.
    """

    def __init__(self, pool: Executor, heartbeat: Heartbeat) -> None:
        self._pool = pool
        self._heartbeat = heartbeat
        self.work: list[Callable[[], None]] = []
        self._running: Future[None] | None = None

    def put(self) -> None:
        """Hand over what is in `work`: run it in order, in the caller's trace context."""
        if self._running is not None:
            self.settle()
        if self.work:
            work, self.work = self.work, []
            self._running = self._pool.submit(contextvars.copy_context().run, _run, work)

    def settle(self) -> None:
        """Wait for the layer that is being handed over, if there is one."""
        running, self._running = self._running, None
        if running is None:
            return
        self._heartbeat.waits = True
        try:
            running.result()
        finally:
            self._heartbeat.waits = False

    def __enter__(self) -> HandOver:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the work that has not begun if the pass has failed; nobody waits for work that has begun."""
        if self._running is not None:
            self._running.cancel()
            self._running = None


def _run(work: Sequence[Callable[[], None]]) -> None:
    with torch.inference_mode():
        for task in work:
            task()
