"""Kernels compiled for a GPU that is not there, by the very calls that launch them where it is.

    with rehearsal(GPUS["sm_90"]) as compiled:
        ...  # ops take their Triton path; every launch is compiled by Triton's own launcher, and none runs

Triton itself derives a kernel's key from a launch's arguments (types, divisibility, constants), the target
and the options, so what is compiled here is what the same call looks up on such a GPU. Ops return torch's
results. Tensors are on the CPU. One rehearsal at a time in a process. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvferry.kernels import dependent_launch
from kvferry.kernels.dense_decode import triton_kernel
from kvferry.kernels.quarantine import rehearsing

WARP_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class RehearsedGpu:
    """Attributes: capability: 90 for sm_90; shared_bytes: of a multiprocessor."""

    capability: int
    shared_bytes: int


GPUS = {
    "sm_80": RehearsedGpu(capability=80, shared_bytes=164 << 10),
    "sm_86": RehearsedGpu(capability=86, shared_bytes=100 << 10),
    "sm_89": RehearsedGpu(capability=89, shared_bytes=100 << 10),
    "sm_90": RehearsedGpu(capability=90, shared_bytes=228 << 10),
    "sm_100": RehearsedGpu(capability=100, shared_bytes=228 << 10),
    "sm_120": RehearsedGpu(capability=120, shared_bytes=100 << 10),
}
"""By architecture (CUDA C++ programming guide, technical specifications)."""


class _Driver(DriverBase):  # type: ignore[misc]
    """The part of a driver that Triton's launcher uses before it compiles."""

    def __init__(self, gpu: RehearsedGpu) -> None:
        self._target = GPUTarget("cuda", gpu.capability, WARP_SIZE)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps a table of compiled kernels, with their target, for each device
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs in a rehearsal")


@contextmanager
def rehearsal(gpu: RehearsedGpu, *, only: str = "") -> Iterator[list[Any]]:
    """Compile instead of launching. The launch raises what the compiler raises.

    Args: only: compile kernels whose names hold this.
    Returns: the compiled kernels (Triton's `CompiledKernel`), each once, which grow as calls are made.
    """
    compiled: list[Any] = []
    seen: set[str] = set()
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if only in kernel.__name__:
            one = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            if one.hash not in seen:
                seen.add(one.hash)
                compiled.append(one)

    before = driver._active
    driver.set_active(_Driver(gpu))
    try:
        with (
            patch.object(JITFunction, "run", compile_only),
            patch.object(triton_kernel, "shared_bytes", lambda device: gpu.shared_bytes),
            patch.object(dependent_launch, "compute_capability", lambda device: gpu.capability),
            patch.object(rehearsing, "is_on", True),
            # outputs that a launch would have written read as zeros
            patch.object(torch, "empty", torch.zeros),
        ):
            yield compiled
    finally:
        driver.set_active(before)
