"""Operators whose Triton kernels are not used any more in this process: their calls take the torch path.

    in use ──differs, raises, hangs or does not compile──► quarantined, until the process ends

The self-test quarantines before a worker serves (`cases.py` has its cases), `attempt` while it serves. An
operator is quarantined once, with the first reason. Written by any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

Reason = Literal["wrong_result", "nan", "out_of_resources", "compile_error", "exception", "hang", "crash"]
T = TypeVar("T")

capturing = threading.Lock()
"""Held while a thread captures a CUDA graph: when any other thread waits for the whole device, the capture
fails, and so does the wait."""
_CAPTURE_S = 30.0
"""Longer than any capture takes."""

_COMPILE_ERRORS = (
    "CompilationError",
    "PTXASError",
    "CompileTimeAssertionFailure",
    "UnsupportedLanguageConstruct",
)


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """Attributes: reason: a short label; detail: what happened, for the log."""

    op: str
    reason: Reason
    detail: str


class _State:
    """Attributes: by_op: another dictionary after every change, because it is read without the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_op: dict[str, Quarantined] = {}
        self.listeners: list[Callable[[Quarantined], None]] = []


state = _State()


class _Rehearsing:
    """Attributes: is_on: whether kernels are compiled instead of launched, as `kvferry compile` does."""

    is_on = False


rehearsing = _Rehearsing()


def quarantine(op: str, reason: Reason, detail: str = "") -> bool:
    """Use the torch path for every later call of an operator. Return whether it was in use until now."""
    entry = Quarantined(op=op, reason=reason, detail=detail)
    with state.lock:
        if op in state.by_op:
            return False
        state.by_op = {**state.by_op, op: entry}
        listeners = list(state.listeners)
    for listener in listeners:
        listener(entry)
    return True


def is_quarantined(op: str) -> bool:
    return op in state.by_op


def uses_quarantined(calls: Iterable[tuple[str, str]]) -> bool:
    """Return whether a kernel among these calls, operators and their paths, may not be used any more."""
    return any(path != "torch" and op in state.by_op for op, path in calls)


def quarantined() -> dict[str, Quarantined]:
    """Return all quarantined operators, by name."""
    return dict(state.by_op)


def on_quarantine(listener: Callable[[Quarantined], None]) -> None:
    """Call a function at every later quarantine, on the thread that found the fault."""
    with state.lock:
        if listener not in state.listeners:
            state.listeners.append(listener)


def attempt(op: str, launch: Callable[[], T], in_torch: Callable[[], T]) -> T:
    """Return what `launch` returns; if it raises, quarantine the operator and return what `in_torch` returns.

    The two must be interchangeable even after a part of `launch` has run; it writes only rows and results. If
    torch raises too, the arguments are to blame and not the kernel.

    In a rehearsal, which launches nothing, the result is torch's, and errors of the compiler are raised.

    Raises: as `recovered`.
    """
    if rehearsing.is_on:
        launch()
        return in_torch()
    try:
        return launch()
    except Exception as error:
        return recovered(op, error, in_torch)


def recovered(op: str, failure: Exception, in_torch: Callable[[], T]) -> T:
    """Return what `in_torch` returns, in place of a launch that has failed; see `attempt`.

    Raises: the failure, if the device is lost or has no memory left, or captures a graph, in which torch
        could not run.
    """
    if isinstance(failure, torch.OutOfMemoryError):
        raise failure
    reason, detail = reason_of(failure), f"{type(failure).__name__}: {failure}"
    if is_capturing():
        quarantine(op, reason, detail)
        raise failure
    if is_lost(failure):
        raise failure
    result = in_torch()
    quarantine(op, reason, detail)
    return result


def is_capturing() -> bool:
    """Return whether this thread's work is captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def reason_of(error: BaseException) -> Reason:
    """Return the label of an error that a kernel raised. Triton's own classes are recognised by name: a CPU
    install has no Triton, and versions move them."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfResources" in names:
        return "out_of_resources"
    return "compile_error" if names.intersection(_COMPILE_ERRORS) else "exception"


def is_lost(error: BaseException | None = None) -> bool:
    """Return whether the CUDA device no longer works in this process; asked after an error, and not while
    this thread captures a graph.

    After an illegal address, a failed assertion or a fault of the hardware CUDA answers every later call with
    an error. Memory that ran out is no such error.
    """
    if isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_available():
        return False
    alone = capturing.acquire(timeout=_CAPTURE_S)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    finally:
        if alone:
            capturing.release()
    return False
