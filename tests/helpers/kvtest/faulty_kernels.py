"""Faults in Triton kernels, by op and kind, and the self-test's child process with such faults.

python -m kvtest.faulty_kernels OP[,OP] KIND TASK
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

LAUNCHES = {
    "chunk_scores": ("kvferry.kernels.chunk_scores.triton_kernel", "chunk_scores"),
    "column_sums": ("kvferry.kernels.attention_mass", "attention_mass"),
    "decoder_ops": ("kvferry.kernels.decoder_ops.triton_kernel", "silu_product"),
    "dense_decode": ("kvferry.kernels.dense_decode.triton_kernel", "dense_decode_batch"),
    "hsa": ("kvferry.kernels.hsa.triton_kernel", "append_and_attend_batch"),
    "kivi": ("kvferry.kernels.kivi.triton_kernel", "kivi_decode_batch"),
    "knapsack": ("kvferry.kernels.knapsack.triton_kernel", "take_increments"),
    "pack": ("kvferry.kernels.packed.triton_kernel", "pack"),
    "packed_check": ("kvferry.kernels.packed.check_kernel", "begin"),
    "trizone": ("kvferry.kernels.trizone.triton_kernel", "trizone_decode_batch"),
    "window_scores": ("kvferry.kernels.attention_mass", "attention_mass"),
}
"""Where each op's kernels are launched; `column_sums` and `window_scores` share theirs."""


class OutOfResources(Exception):
    """Named as Triton's."""


class CompilationError(Exception):
    """Named as Triton's."""


def _result(returned: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The tensor that a launch has filled, the last one of several."""
    if returned is not None:
        return returned[-1] if isinstance(returned, tuple) else returned
    return kwargs["output"]


def _spoil(value: float) -> Callable[..., Any]:
    def fault(launch: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        returned = launch(*args, **kwargs)
        result = _result(returned, kwargs)
        if result.is_floating_point():
            result.view(-1)[:: max(result.numel() // 50, 1)] += value
        else:  # packed bytes, bits, faults
            result[len(result) // 2 :] ^= 255
        return returned

    return fault


def _raise(error: Exception) -> Callable[..., Any]:
    def fault(launch: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise error

    return fault


def _sleep(*_: Any) -> None:
    time.sleep(3600)


def _crash(*_: Any) -> None:
    os._exit(66)


FAULTS: dict[str, Callable[..., Any]] = {
    "wrong_result": _spoil(1.0),
    "nan": _spoil(torch.nan),
    "out_of_resources": _raise(
        OutOfResources("out of resource: shared memory, Required: 2, Hardware limit: 1")
    ),
    "compile_error": _raise(CompilationError("at 3:4")),
    "exception": _raise(RuntimeError("Triton Error [CUDA]: device kernel image is invalid")),
    "hang": _sleep,
    "crash": _crash,
}


def install(op: str, kind: str, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make every launch of an op's kernels fail in this process. Args: replace: as `setattr`."""
    module, name = LAUNCHES[op]
    owner = importlib.import_module(module)
    launch = getattr(owner, name)
    replace(owner, name, lambda *args, **kwargs: FAULTS[kind](launch, args, kwargs))


def main(arguments: Sequence[str]) -> int:
    from kvferry.shared.device.self_test import run_child

    ops, kind, task = arguments
    for op in ops.split(","):
        install(op, kind)
    return run_child([task])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
