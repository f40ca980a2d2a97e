"""Times on a GPU: a launch's median over replays of a CUDA graph, and the copy bandwidth of the same run.

A graph takes the host's launch time out. A large buffer is written between replays, so that a case finds its
input in memory rather than in the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

FLUSH_BYTES = 512 << 20
COPY_BYTES = 2 << 30
REPEATS = 30


def time_us(launch: Callable[[], object], *, captured: bool = True, repeats: int = REPEATS) -> float:
    """Median microseconds of one launch, from an emptied cache. Args: captured: replay a CUDA graph of it."""
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
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a device-to-device copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (time_us(lambda: target.copy_(source)) * 1e-6)


def bf16_flops_per_s() -> float:
    """Multiplications and additions a second of a large bfloat16 product: the peak that can be had."""
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / (time_us(lambda: torch.mm(a, b, out=out)) * 1e-6)
