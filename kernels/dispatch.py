"""Decides which implementation of each kernel runs, and counts the decisions.

Every op calls `path_for` once per call, so a service can show which path each op takes (`kernel_paths`) and
took (`calls`). Triton is looked for at the first use, never at import: a CPU install has none.

    mode "auto"     Triton on CUDA if it is installed and supports the call; for some ops of float32 on a CPU,
                    C code that the machine's compiler has made (`native/`); else torch
    mode "torch"    torch everywhere
    mode "triton"   Triton, on CUDA or in its interpreter (TRITON_INTERPRET=1); an error if it cannot run a
    call

A quarantined operator (`quarantine.py`) takes the torch path in every mode.

Also the argument checks that ops share. `check_*` raise ValueError with the name, the value and what is
allowed. `*_problem` return why a Triton kernel cannot run a call, or None.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.native.library import is_available
from kvferry.kernels.quarantine import attempt, is_quarantined, rehearsing

KernelMode = Literal["auto", "torch", "triton"]
KernelPath = Literal["triton", "interpreter", "native", "torch"]
Problem = Callable[[], str | None]
T = TypeVar("T")
StepPathName = Literal["graph", "eager"]
KERNEL_MODES: tuple[KernelMode, ...] = get_args(KernelMode)

TRITON_OPS = (
    "chunk_scores",
    "column_sums",
    "decoder_ops",
    "dense_decode",
    "hsa",
    "kivi",
    "knapsack",
    "pack",
    "packed_check",
    "trizone",
    "window_scores",
)
"""Ops with a Triton kernel."""
TORCH_OPS = ("hsa_pages", "packed_hsa", "quantise", "ragged_decode")
"""Ops that have only a torch implementation."""
NATIVE_OPS = ("chunk_scores", "decoder_ops", "dense_decode", "hsa", "packed_hsa", "trizone")
"""Ops that have C code for CPUs."""
NATIVE_CALLS = ("chunk_scores",)
"""Of these, the ops whose every call may run in C; the others only for a decode step's whole batch."""

MAX_GROUP_SIZE = 16
MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MODES_WITH_KERNELS: dict[bool, tuple[KernelMode, ...]] = {True: ("auto", "triton"), False: ("triton",)}
"""The modes in which Triton is looked for, by whether the device is CUDA."""


class KernelUnavailable(RuntimeError):
    """Triton was requested, and cannot run here."""


class _State:
    """The process's mode and counts; one object, because ops are called from everywhere."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mode: KernelMode = "auto"
        self.calls: Counter[tuple[str, KernelPath]] = Counter()
        self.has_native: bool | None = None


_state = _State()


class _Thread(threading.local):
    """What one thread has asked for.

    Attributes: recorded: its calls since it began to record, None if it does not; torch_only: whether they
        take the torch path.
    """

    recorded: Counter[tuple[str, KernelPath]] | None = None
    torch_only = False


_thread = _Thread()


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
    """Return the process's mode."""
    return _state.mode


def path_for(op: str, device: torch.device, unsupported: Problem | str | None = None) -> KernelPath:
    """Return the path that a call of `op` takes, and count it.

    Args: unsupported: why the op's Triton kernel cannot run this call, None if it can; or a function that
        returns this, called only if there is a kernel.
    Raises:
        KernelUnavailable: mode is "triton" and Triton cannot run on the device, or cannot run this call.
    """
    path: KernelPath = "torch"
    # saves a call per layer on a CPU
    if op in NATIVE_CALLS or _state.mode in _MODES_WITH_KERNELS[device.type == "cuda" or rehearsing.is_on]:
        path = planned_path(op, device, unsupported)
    if _thread.recorded is not None:
        _thread.recorded[op, path] += 1
    with _state.lock:
        _state.calls[op, path] += 1
    return path


def run(
    op: str, device: torch.device, function: str, in_torch: partial[T], unsupported: Problem | None = None
) -> T:
    """Run a call as `path_for` says, and in torch also where Triton fails.

    Args: function, in_torch: as of `launch`.
    """
    if path_for(op, device, unsupported) == "torch":
        return in_torch()
    return attempt(op, lambda: launch(function, in_torch), in_torch)


def launch(function: str, in_torch: partial[T]) -> T:
    """Call a function of a Triton module, which is imported now, because a CPU install has no Triton.

    Args:
        function: where it is below `kvferry.kernels`: "hsa.triton_kernel.attend".
        in_torch: a call of the same in torch, with the same arguments.
    """
    module, _, name = function.rpartition(".")
    called: Callable[..., T] = getattr(importlib.import_module(f"kvferry.kernels.{module}"), name)
    return called(*in_torch.args, **in_torch.keywords)


def planned_path(op: str, device: torch.device, unsupported: Problem | str | None = None) -> KernelPath:
    """Do as `path_for` without counting; "native" of ops outside `NATIVE_CALLS` only for a whole batch."""
    is_native = uses_native(op, device) and not is_quarantined(op)
    if is_native and (unsupported() if callable(unsupported) else unsupported) is None:
        return "native"
    if op in TORCH_OPS or _state.mode not in _MODES_WITH_KERNELS[device.type == "cuda" or rehearsing.is_on]:
        return "torch"
    if _thread.torch_only or is_quarantined(op):
        return "torch"
    if _state.mode == "auto" and not triton_installed():
        return "torch"
    path = _triton_path(device)
    problem = unsupported() if callable(unsupported) else unsupported
    if problem is None:
        return path
    if _state.mode == "triton":
        raise KernelUnavailable(f"kernels is 'triton', and {op} has no Triton kernel for this: {problem}")
    return "torch"


def compiles(device: torch.device) -> bool:
    return device.type == "cuda" and _state.mode != "torch" and triton_installed() and not interpreting()


def uses_native(op: str, device: torch.device) -> bool:
    """Return whether C code may run an op's float32 calls on this thread."""
    if op not in NATIVE_OPS or device.type != "cpu" or _state.mode != "auto":
        return False
    if _thread.torch_only or rehearsing.is_on:
        return False
    if _state.has_native is None:
        _state.has_native = is_available()
    return _state.has_native


def kernel_paths(device: torch.device) -> dict[str, KernelPath]:
    """Return `planned_path` of every op on a device, by name."""
    return {op: planned_path(op, device) for op in sorted(TRITON_OPS + TORCH_OPS)}


def calls() -> dict[tuple[str, KernelPath], int]:
    """Return how often each op took each path in this process."""
    with _state.lock:
        return dict(_state.calls)


def count(calls: Mapping[tuple[str, KernelPath], int]) -> None:
    """Add calls that a captured step repeats, or that C code has run."""
    with _state.lock:
        _state.calls.update(calls)


@contextmanager
def recording() -> Iterator[Counter[tuple[str, KernelPath]]]:
    """Record the calls that this thread makes in the context; they are counted as well."""
    _thread.recorded = calls = Counter[tuple[str, KernelPath]]()
    try:
        yield calls
    finally:
        _thread.recorded = None


@contextmanager
def torch_only() -> Iterator[None]:
    """Make every op take the torch path on this thread in the context."""
    _thread.torch_only = True
    try:
        yield
    finally:
        _thread.torch_only = False


def planned_step_path(device: torch.device) -> StepPathName:
    """Return how a decode step with supported attention runs: captured in a graph, or eagerly."""
    return "graph" if device.type == "cuda" and planned_path("dense_decode", device) == "triton" else "eager"


def interpreting() -> bool:
    """Return whether Triton runs kernels in its CPU interpreter in this process."""
    if not triton_installed():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def triton_installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _triton_path(device: torch.device) -> KernelPath:
    if not triton_installed():
        raise KernelUnavailable("kernels is 'triton', and Triton is not installed; install kvferry[gpu]")
    if rehearsing.is_on:
        return "triton"
    if interpreting():
        return "interpreter"
    if device.type != "cuda":
        raise KernelUnavailable(
            f"kernels is 'triton', and the device is {device}; Triton needs CUDA, or TRITON_INTERPRET=1 to "
            "interpret its kernels on the CPU"
        )
    return "triton"


def check_size(name: str, value: int, low: int, high: int | None = None) -> None:
    """Require low <= value <= high; `high` None: no upper limit."""
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} is {value}; it must be {allowed}")


def check_same_kind(**tensors: Tensor) -> None:
    """Require one floating dtype and one device."""
    first, *others = tensors.values()
    if not first.is_floating_point() or any(tensor.dtype != first.dtype for tensor in others):
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(f"dtypes must be floating and agree: {found}")
    if any(tensor.device != first.device for tensor in others):
        found = ", ".join(f"{name} {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"devices must agree: {found}")


def check_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, least: int = 1, prefix: str = "", rows: str = "n"
) -> None:
    """Require queries `[H_kv, G, D]` and keys and values `[H_kv, n, D]`, n >= least, of one dtype and device.
    Values may have fewer channels than keys (latent rows).

    Args: prefix, rows: in messages, before "keys" and "values", and instead of "n".
    """
    shape = keys.shape
    if (
        queries.ndim != 3
        or len(shape) != 3
        or values.shape[:-1] != shape[:-1]
        or not 0 < values.shape[-1] <= shape[-1]
        or (shape[0], shape[2]) != (queries.shape[0], queries.shape[2])
        or shape[1] < least
    ):
        raise ValueError(
            f"queries {tuple(queries.shape)}, {prefix}keys {tuple(shape)} and {prefix}values "
            f"{tuple(values.shape)} must be [H_kv, G, D], [H_kv, {rows}, D] and [H_kv, {rows}, D] with "
            f"{rows} at least {least}"
        )
    check_same_kind(**{"queries": queries, f"{prefix}keys": keys, f"{prefix}values": values})


def check_scores(queries: Tensor, keys: Tensor, *, rows: str) -> None:
    """Require queries `[H_kv, G, rows, D]` and keys `[H_kv, T, D]` of one dtype and device."""
    fits = queries.ndim == 4 and keys.ndim == 3
    if not fits or (keys.shape[0], keys.shape[2]) != (queries.shape[0], queries.shape[3]):
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            f"expected [H_kv, G, {rows}, D] and [H_kv, T, D]"
        )
    if queries.dtype != keys.dtype or queries.device != keys.device:
        raise ValueError(
            f"queries are {queries.dtype} on {queries.device}, keys {keys.dtype} on {keys.device}; "
            "they must agree"
        )


def dtype_problem(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why kernels do not support a dtype on a device; None if they do. Compiled for float32 they spill,
    or take more shared memory than smaller GPUs have."""
    if dtype == torch.float32 and device.type == "cuda":
        return "dtype is torch.float32; on CUDA it must be torch.float16 or torch.bfloat16"
    return None


def shape_problem(dtype: torch.dtype, group_size: int, head_dim: int, device: torch.device) -> str | None:
    """Say why no kernel supports queries of this dtype and shape on a device; None if one does."""
    if (problem := dtype_problem(dtype, device)) is not None:
        return problem
    if dtype not in DTYPES:
        return f"dtype is {dtype}; it must be one of {', '.join(str(d) for d in DTYPES)}"
    if group_size > MAX_GROUP_SIZE:
        return f"there are {group_size} query heads per KV head; there must be at most {MAX_GROUP_SIZE}"
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim is {head_dim}; it must be a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


def alignment_problem(**tensors: Tensor) -> str | None:
    """Say why rows of these `[H, n, D]` tensors cannot be read 16 bytes at a time; None if they can."""
    for name, tensor in tensors.items():
        size, strides = tensor.element_size(), tensor.stride()
        aligned = strides[-1] == 1
        for extent, stride in zip(tensor.shape[:-1], strides[:-1], strict=True):
            aligned &= extent <= 1 or stride * size % ALIGNMENT_BYTES == 0
        if not aligned:
            return f"{name} has strides {strides}; rows must start at multiples of {ALIGNMENT_BYTES} bytes"
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            return f"{name} does not start at a multiple of {ALIGNMENT_BYTES} bytes"
    return None


def attention_problem(queries: Tensor, keys: Tensor, values: Tensor, *, prefix: str = "") -> str | None:
    """Say why no kernel supports queries `[H_kv, G, D]` and rows `[H_kv, n, D]`; None if one does. See
    `check_attention`."""
    problem = shape_problem(queries.dtype, queries.shape[1], queries.shape[2], queries.device)
    if problem is None and keys.shape[2] != values.shape[2]:  # latent rows
        problem = f"keys have {keys.shape[2]} channels and values {values.shape[2]}; they must have as many"
    if problem is None and keys.shape[1] > 1 and keys.stride(1) != values.stride(1):
        problem = f"rows of {prefix}keys and {prefix}values have strides {keys.stride(1)}, {values.stride(1)}"
    return problem or alignment_problem(**{f"{prefix}keys": keys, f"{prefix}values": values})


def scores_problem(queries: Tensor, keys: Tensor) -> str | None:
    """Say why no kernel supports scores of keys `[H_kv, T, D]` by queries `[H_kv, G, W, D]`, or None."""
    return shape_problem(queries.dtype, 1, queries.shape[3], keys.device) or alignment_problem(keys=keys)
