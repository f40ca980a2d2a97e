"""Each kernel against its reference, its bandwidth against a copy's, and one step captured and replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.column_sums import window_scores
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.dense_decode import dense_decode
from kvferry.shared.device.cuda_device import CudaDevice
from kvferry.shared.device.kernel_paths import Role
from kvferry.shared.device.self_test import self_test
from kvferry.tools.doctor.attention import AttentionCase, attention_cases, dense_case
from kvferry.tools.doctor.report import Finding, guarded

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_REPEATS = 10
_LEAST_SHARES = {"triton": 0.3, "native": 0.02}
"""Of the copy's bandwidth; less means that something is wrong. The goals on a GPU are 0.6 to 0.85. C code
computes as long as it reads: 0.95 and 0.17 were measured on one core, of dense rows and of packed ones."""
_GRAPH_BYTES = 4 << 20


def kernel_findings(shape: BatchShape) -> Iterator[Finding]:
    """Test both roles' kernels; if torch runs everything, test torch against plain formulas."""
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
        """Return the time of the fastest of some repeats."""
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
    """Compare the bytes a second that a shape's attention kernels, or C code, read with a copy's."""
    device, clock = shape.device, _Clock(shape.device)
    size = (1 << 30) if device.type == "cuda" else (64 << 20)
    copy = _copy_bytes_s(clock, size, device)
    yield Finding(
        check="copy", verdict="ok", found=f"{copy / 1e9:.1f} GB/s on the device", data={"bytes_s": copy}
    )
    problem = dispatch.shape_problem(shape.dtype, shape.group_size, shape.head_dim, device)
    for name, (op, make) in attention_cases(shape).items():
        path = dispatch.planned_path(op, device, problem)
        check = f"bandwidth {name}"
        # torch has one operator for attention to all rows
        if path in ("triton", "native") or (path, name) == ("torch", "dense_decode"):
            yield from guarded(check, partial(_bandwidth, check, path, partial(make, shape, size // 4), copy))
        else:
            found = "kernels are interpreted" if path == "interpreter" else "torch runs it, in many operators"
            yield Finding(check=check, verdict="skip", found=found, data={"path": path})


def _copy_bytes_s(clock: _Clock, size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds(lambda: target.copy_(source))


def _bandwidth(check: str, path: str, make: Callable[[], AttentionCase], copy: float) -> Iterator[Finding]:
    """Measure one case's bandwidth. Args: copy: bytes a second."""
    with torch.inference_mode():
        case = make()
        if path == "native" and not case.is_launched:
            yield Finding(check=check, verdict="skip", found="the C code does not have it")
            return
        rate = case.num_bytes / _seconds(case)
    share = rate / copy
    is_slow = share < _LEAST_SHARES.get(path, 0.0)
    yield Finding(
        check=check,
        verdict="warn" if is_slow else "ok",
        found=f"{rate / 1e9:.1f} GB/s over {case.what} ({path}), {share:.0%} of the copy",
        advice="look at the clocks and at other processes on this device" if is_slow else "",
        data={"bytes_s": rate, "share": share, "path": path, "num_bytes": case.num_bytes},
    )


def _seconds(case: AttentionCase) -> float:
    """Time one step; on a GPU a captured one, so that the host's part is not in it."""
    device = case.run().device
    clock = _Clock(device)
    if device.type != "cuda":
        return clock.seconds(case.run)
    graphs = CudaDevice(device)

    def step() -> None:
        case.run()

    with graphs.scope():
        return clock.seconds(graphs.capture(step))


def graph_findings(shape: BatchShape) -> Iterator[Finding]:
    """Capture one attention step in a CUDA graph and replay it."""
    if shape.device.type != "cuda":
        yield Finding(check="graph", verdict="skip", found="no GPU")
        return
    device = CudaDevice(shape.device)
    with torch.inference_mode(), device.scope():
        attend = dense_case(shape, _GRAPH_BYTES).run
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
