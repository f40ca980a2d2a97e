"""Each kernel against its reference, its bandwidth against a copy's, and one step captured and replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.column_sums import window_scores
from kvferry.kernels.decode_batch import BatchShape, CachedRows, NewTokens, SlotBatch
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.dense_decode.batch import DenseBatch
from kvferry.services.decode.cuda_device import CudaDevice
from kvferry.shared.kernel_paths import Role
from kvferry.shared.self_test import self_test
from kvferry.tools.doctor.report import Finding

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_REPEATS = 10
_LEAST_SHARE = 0.3
"""Of the copy's bandwidth; less on a GPU means that something is wrong. The goals are 0.6 to 0.85."""


def kernel_findings(shape: BatchShape) -> Iterator[Finding]:
    """The self-test of both roles' kernels; where torch runs everything, torch against plain formulas."""
    tested = [finding for role in get_args(Role) for finding in self_test(role, shape)]
    for finding in tested:
        data: dict[str, object] = {"op": finding.op, "reason": finding.reason, "seconds": finding.seconds}
        if finding.reason is None:
            found = f"{finding.num_cases} cases equal torch's, {finding.seconds:.1f} s with compilation"
            yield Finding(check=f"kernel {finding.op}", verdict="ok", found=found, data=data)
        else:
            yield Finding(
                check=f"kernel {finding.op}",
                verdict="fail",
                found=f"{finding.reason}: {finding.detail}",
                advice="workers use torch for it; report this with kvferry doctor's JSON",
                data=data,
            )
    if not tested:
        yield from _torch_findings(shape)


def _torch_findings(shape: BatchShape) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(shape.device, shape.dtype)

    heads, group, head_dim, scale = shape.num_kv_heads, shape.group_size, shape.head_dim, shape.head_dim**-0.5
    queries, keys, values = (
        random(heads, group, head_dim),
        random(heads, 257, head_dim),
        random(heads, 257, head_dim),
    )
    weights = torch.softmax(scale * (queries.double() @ keys.double().mT), dim=-1)
    dense = dense_decode(queries, keys, values, scaling=scale), weights @ values.double()
    window = random(heads, group, 16, head_dim)
    logits = scale * (window.double() @ keys.double()[:, None].mT)
    future = torch.arange(257, device=shape.device) > torch.arange(241, 257, device=shape.device)[:, None]
    sums = torch.softmax(logits.masked_fill(future, -torch.inf), dim=-1).sum((1, 2))
    scores = window_scores(window, keys, scaling=scale), sums
    for op, (result, expected) in (("dense_decode", dense), ("window_scores", scores)):
        error = float((result.double() - expected).norm() / expected.norm())
        is_right = error <= _TOLERANCE[shape.dtype]
        yield Finding(
            check=f"torch {op}",
            verdict="ok" if is_right else "fail",
            found=f"relative error {error:.1e} against float64",
            advice="" if is_right else "this torch computes wrongly on this machine; install another build",
            data={"error": error},
        )


class _Clock:
    """Seconds that work takes on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object]) -> float:
        """The fastest of some repeats."""
        work()
        times = []
        for _ in range(_REPEATS):
            self._wait()
            begin_s = time.perf_counter()
            work()
            self._wait()
            times.append(time.perf_counter() - begin_s)
        return min(times)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def bandwidth_findings(shape: BatchShape) -> Iterator[Finding]:
    """Bytes that decode attention reads in a second, against a copy on the device."""
    device, clock = shape.device, _Clock(shape.device)
    size = (1 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / clock.seconds(lambda: target.copy_(source))
    yield Finding(
        check="copy", verdict="ok", found=f"{copy / 1e9:.1f} GB/s on the device", data={"bytes_s": copy}
    )
    if dispatch.planned_path("dense_decode", device) == "interpreter":
        yield Finding(check="bandwidth", verdict="skip", found="kernels are interpreted")
        return
    row_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    num_rows = max(size // 4 // row_bytes, 256)
    batch, attend = _dense_batch(shape, num_rows)
    seconds = clock.seconds(attend)
    rate = num_rows * row_bytes / seconds
    share, path = rate / copy, dispatch.planned_path("dense_decode", device)
    is_slow = device.type == "cuda" and share < _LEAST_SHARE
    yield Finding(
        check="bandwidth dense_decode",
        verdict="warn" if is_slow else "ok",
        found=f"{rate / 1e9:.1f} GB/s over {num_rows:,} rows ({path}), {share:.0%} of the copy",
        advice="look at the clocks and at other processes on this GPU" if is_slow else "",
        data={"bytes_s": rate, "share": share, "path": path, "is_launched": batch.is_launched},
    )


def _dense_batch(shape: BatchShape, num_rows: int) -> tuple[SlotBatch[Any, Any], Callable[[], Tensor]]:
    """One sequence, and a step over it."""
    heads, head_dim = shape.num_kv_heads, shape.head_dim
    arena = torch.randn(2, heads, num_rows + 1, head_dim, device=shape.device).to(shape.dtype)
    batch = DenseBatch(replace(shape, num_slots=1), arena.view(-1))
    batch.place(0, {0: CachedRows(keys=arena[0], values=arena[1], length=num_rows)})
    scratch = batch.scratch(1) if batch.is_launched else None
    queries = torch.randn(1, heads, shape.group_size, head_dim, device=shape.device).to(shape.dtype)
    row = torch.randn(1, heads, head_dim, device=shape.device).to(shape.dtype)
    step = NewTokens(queries, row, row, head_dim**-0.5)
    return batch, lambda: batch.attend(0, step, errors={}, scratch=scratch)


def graph_findings(shape: BatchShape) -> Iterator[Finding]:
    """One attention step captured in a CUDA graph and replayed."""
    if shape.device.type != "cuda":
        yield Finding(check="graph", verdict="skip", found="no GPU")
        return
    device = CudaDevice(shape.device)
    with torch.inference_mode(), device.scope():
        _, attend = _dense_batch(shape, 1000)
        expected, captured = attend().clone(), torch.zeros_like(attend())

        def step() -> None:
            captured.copy_(attend())

        replay = device.capture(step)
        captured.zero_()
        replay()
        torch.cuda.synchronize(shape.device)
    is_same = bool(torch.equal(captured, expected))
    yield Finding(
        check="graph",
        verdict="ok" if is_same else "fail",
        found="captured and replayed" if is_same else "the replay differs from the eager step",
        advice="" if is_same else "report this with kvferry doctor's JSON",
    )
