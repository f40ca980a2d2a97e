"""Decides which implementation of each kernel runs, and counts the decisions.

Every op calls `path_for` once per call, so a service can show which path each op takes (`kernel_paths`) and
took (`calls`). Triton is looked for at the first use, never at import: a CPU install has none.

    mode "auto"     Triton on CUDA if it is installed and supports the call, else torch
    mode "torch"    torch everywhere
    mode "triton"   Triton, on CUDA or in its interpreter (TRITON_INTERPRET=1); an error if it cannot run a
    call
"""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

import torch

KernelMode = Literal["auto", "torch", "triton"]
KernelPath = Literal["triton", "interpreter", "torch"]
Problem = Callable[[], str | None]
StepPathName = Literal["graph", "eager"]
KERNEL_MODES: tuple[KernelMode, ...] = get_args(KernelMode)

TRITON_OPS = ("chunk_scores", "column_sums", "dense_decode", "hsa", "pack", "trizone", "window_scores")
"""Ops with a Triton kernel."""
TORCH_OPS = (
    "exact_topk",
    "hsa_pages",
    "kivi",
    "packed_hsa",
    "pruned_decode",
    "quantise",
    "quest",
    "ragged_decode",
    "sparq",
)
"""Ops that have only a torch implementation."""


class KernelUnavailable(RuntimeError):
    """Triton was requested, and cannot run here."""


class _State:
    """The process's mode and counts; one object, because ops are called from everywhere."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mode: KernelMode = "auto"
        self.calls: Counter[tuple[str, KernelPath]] = Counter()


_state = _State()


class _Recording(threading.local):
    """The calls of one thread since it began to record, None if it does not record."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, KernelPath]] | None = None


_recording = _Recording()


def configure(mode: KernelMode, device: torch.device) -> None:
    """Set the process's mode, at its start.

    Args: device: where the kernels will run.
    Raises:
        KernelUnavailable: mode is "triton" and Triton cannot run on the device.
        ValueError: unknown mode.
    """
    if mode not in KERNEL_MODES:
        raise ValueError(f"kernels is {mode!r}; it must be one of {', '.join(KERNEL_MODES)}")
    if mode == "triton":
        _triton_path(device)
    with _state.lock:
        _state.mode = mode


def mode() -> KernelMode:
    """The process's mode."""
    return _state.mode


def path_for(op: str, device: torch.device, unsupported: Problem | str | None = None) -> KernelPath:
    """The path that a call of `op` takes, counted.

    Args: unsupported: why the op's Triton kernel cannot run this call, None if it can; or a function that
    returns
        this, called only if there is a kernel.
    Raises:
        KernelUnavailable: mode is "triton" and Triton cannot run on the device, or cannot run this call.
    """
    path = planned_path(op, device, unsupported)
    if _recording.calls is not None:
        _recording.calls[op, path] += 1
    with _state.lock:
        _state.calls[op, path] += 1
    return path


def planned_path(op: str, device: torch.device, unsupported: Problem | str | None = None) -> KernelPath:
    """As `path_for`, without counting."""
    if op in TORCH_OPS or _state.mode == "torch" or (_state.mode == "auto" and device.type != "cuda"):
        return "torch"
    if _state.mode == "auto" and not _triton_installed():
        return "torch"
    path = _triton_path(device)
    problem = unsupported() if callable(unsupported) else unsupported
    if problem is None:
        return path
    if _state.mode == "triton":
        raise KernelUnavailable(f"kernels is 'triton', and {op} has no Triton kernel for this: {problem}")
    return "torch"


def kernel_paths(device: torch.device) -> dict[str, KernelPath]:
    """`planned_path` of every op on a device, by name."""
    return {op: planned_path(op, device) for op in sorted(TRITON_OPS + TORCH_OPS)}


def calls() -> dict[tuple[str, KernelPath], int]:
    """How often each op took each path in this process."""
    with _state.lock:
        return dict(_state.calls)


def count(calls: Mapping[tuple[str, KernelPath], int]) -> None:
    """Add calls that a captured step repeats."""
    with _state.lock:
        _state.calls.update(calls)


@contextmanager
def recording() -> Iterator[Counter[tuple[str, KernelPath]]]:
    """Record the calls that this thread makes in the context; they are counted as well."""
    _recording.calls = calls = Counter[tuple[str, KernelPath]]()
    try:
        yield calls
    finally:
        _recording.calls = None


def planned_step_path(device: torch.device) -> StepPathName:
    """How a decode step with supported attention runs: captured in a graph, or eagerly."""
    return "graph" if device.type == "cuda" and planned_path("dense_decode", device) == "triton" else "eager"


def interpreting() -> bool:
    """Whether Triton runs kernels in its CPU interpreter in this process."""
    if not _triton_installed():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_path(device: torch.device) -> KernelPath:
    if not _triton_installed():
        raise KernelUnavailable("kernels is 'triton', and Triton is not installed; install kvferry[gpu]")
    if interpreting():
        return "interpreter"
    if device.type != "cuda":
        raise KernelUnavailable(
            f"kernels is 'triton', and the device is {device}; Triton needs CUDA, or TRITON_INTERPRET=1 to "
            "interpret its kernels on the CPU"
        )
    return "triton"
