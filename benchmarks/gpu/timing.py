"""Clocks of the benchmark: a GPU's events and graphs, or the host's clock where `--check` has no GPU.

A launch's time is its median over replays of a CUDA graph, which takes the host's part out; what a graph of
one smallest kernel takes is told beside the results. A large buffer is read between replays, so that a case
finds its input in memory rather than in the cache, and nothing in the cache that is still to be written.
Times by the host's clock are of the interpreter and say nothing; they are taken so that the code that takes
them has run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from kvferry.services.prefill.host_copies import HostCopies, host_copies
from kvferry.shared.device.cuda_device import CudaDevice
from kvferry.shared.device.step_device import StepDevice

FLUSH_BYTES = 512 << 20
COPY_BYTES = 2 << 30
REPEATS = 30
PROFILED = 40
"""Rows of a profile: those that take longest."""


class Clock(Protocol):
    """Times work on a device.

    Attributes: device: where tensors are made; warms_up: whether first runs are slower than those after them.
    """

    device: torch.device
    warms_up: bool

    def launch_us(self, launch: Callable[[], object], *, captured: bool) -> float:
        """Median microseconds of one launch. Args: captured: without the host's part."""
        ...

    def wait(self) -> None:
        """Until the device has done all it was asked."""
        ...

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written a second by a kernel that copies on the device."""
        ...

    def bf16_flops_per_s(self) -> float:
        """Multiplications and additions a second of a large product: the peak that can be had."""
        ...

    def free_bytes(self) -> int:
        """Memory that can be had."""
        ...

    def forget_peak(self) -> None:
        """Begin to watch for the peak of memory in use."""
        ...

    def peak_bytes(self) -> int:
        """The most memory in use since `forget_peak`; 0 where it is not counted."""
        ...

    def step_device(self, *, captures: bool = True) -> StepDevice:
        """What decode steps run on. Args: captures: whether steps are captured where they can be."""
        ...

    def copies(self) -> HostCopies:
        """What brings a layer to the host."""
        ...

    def elapsed_s(self, work: Callable[[], object]) -> float:
        """Seconds that some work takes from here to its end on the device."""
        ...

    def profile(self, work: Callable[[], object], times: int) -> list[dict[str, Any]]:
        """What the device runs: name, count and microseconds of one `work`, the longest first."""
        ...


class CudaClock:
    """Implements `Clock`."""

    warms_up = True

    def __init__(self) -> None:
        self.device = torch.device("cuda")

    def launch_us(self, launch: Callable[[], object], *, captured: bool) -> float:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        run = launch
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
            run = graph.replay
        flush = torch.zeros(FLUSH_BYTES // 8, dtype=torch.int64, device="cuda")
        sum_of_flush = torch.empty((), dtype=torch.int64, device="cuda")
        times = []
        for _ in range(REPEATS):
            torch.sum(flush, dim=0, out=sum_of_flush)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def copy_bytes_per_s(self) -> float:
        return copy_bytes_per_s(self, COPY_BYTES)

    def bf16_flops_per_s(self) -> float:
        return bf16_flops_per_s(self, 8192)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def step_device(self, *, captures: bool = True) -> StepDevice:
        return CudaDevice(self.device, captures=captures)

    def copies(self) -> HostCopies:
        return host_copies(self.device)

    def elapsed_s(self, work: Callable[[], object]) -> float:
        self.wait()
        begin_s = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin_s

    def profile(self, work: Callable[[], object], times: int) -> list[dict[str, Any]]:
        return _profile(self, ProfilerActivity.CUDA, "device_time_total", work, times)


class RepeatingDevice(StepDevice):
    """Takes the path of a device that captures: what is repeated is the step's function itself."""

    captures = True

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


class HostClock:
    """Implements `Clock` on the CPU, with one repetition of everything."""

    warms_up = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def launch_us(self, launch: Callable[[], object], *, captured: bool) -> float:
        return self.elapsed_s(launch) * 1e6

    def wait(self) -> None:
        """Nothing runs behind."""

    def copy_bytes_per_s(self) -> float:
        return copy_bytes_per_s(self, 1 << 20)

    def bf16_flops_per_s(self) -> float:
        return bf16_flops_per_s(self, 64)

    def free_bytes(self) -> int:
        return 64 << 20

    def forget_peak(self) -> None:
        """Nobody counts."""

    def peak_bytes(self) -> int:
        return 0

    def step_device(self, *, captures: bool = True) -> StepDevice:
        return RepeatingDevice() if captures else StepDevice()

    def copies(self) -> HostCopies:
        return host_copies(self.device)

    def elapsed_s(self, work: Callable[[], object]) -> float:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    def profile(self, work: Callable[[], object], times: int) -> list[dict[str, Any]]:
        return _profile(self, ProfilerActivity.CPU, "self_cpu_time_total", work, times)


def _profile(
    clock: Clock, activity: ProfilerActivity, time_of: str, work: Callable[[], object], times: int
) -> list[dict[str, Any]]:
    with profile(activities=[activity]) as seen:
        for _ in range(times):
            work()
        clock.wait()
    rows = [
        {"name": event.key[:120], "count": event.count / times, "us": getattr(event, time_of) / times}
        for event in seen.key_averages()
    ]
    return sorted((row for row in rows if row["us"]), key=lambda row: -row["us"])[:PROFILED]


def copy_bytes_per_s(clock: Clock, size_bytes: int) -> float:
    """Of a kernel's copy: the driver's own, which a graph makes of `copy_`, moves a third less on an H200."""
    source = torch.zeros(size_bytes // 4, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size_bytes / (clock.launch_us(lambda: torch.neg(source, out=target), captured=True) * 1e-6)


def smallest_launch_us(clock: Clock) -> float:
    """What the clock shows for next to no work: the part of every time that is not the kernel's."""
    one = torch.zeros(1, device=clock.device)
    return clock.launch_us(lambda: one.add_(1), captured=True)


def bf16_flops_per_s(clock: Clock, size: int) -> float:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=clock.device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / (clock.launch_us(lambda: torch.mm(a, b, out=out), captured=True) * 1e-6)
