"""Products of a real model's layers on the CPU: our C code beside the libraries that torch has.

    python benchmarks/cpu_products.py [--rows 1 2 4 8 64 1024] [--threads 1 2] [--seconds 0.3]
        [--clock wall|cpu] [--output FILE]

Shapes are Qwen2.5-0.5B's (columns x rows of a weight). All ways of one shape, number of rows and threads
alternate, one call at a time, so that other work of the machine slows all of them alike; medians. Weights are
bfloat16 numbers, and there are so many copies of them that none is in a cache from the call before:

    float32, bfloat16        torch's linear
    implicit                 torch's linear of float32, whose products oneDNN may compute in bfloat16
    packed float32, bfloat16 oneDNN with weights in the order that it likes
    mkl                      MKL with such weights, float32
    C, C float32             kernels/native/products.c; with weights of 16 and of 32 bits

GB/s are of the weights as they are stored. A copy of memory is measured in the same run, with its bytes read
and written.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_decode import CLOCKS, commit, cpu_name
from torch import Tensor

from kvferry.kernels.native.library import KINDS, Product, library

SHAPES = ((896, 896), (896, 128), (896, 4864), (4864, 896), (896, 151936))
"""Columns and rows."""
CACHED_BYTES = 64 << 20
"""Weights of a way are at least so many bytes, some copies of one after another."""
COPIED_BYTES = 256 << 20
Call = Callable[[int], object]


def ways(columns: int, rows: int, tokens: int, threads: int) -> dict[str, tuple[Call, int]]:
    """A call by the number of a copy of the weights, and the bytes of one copy, by way."""
    generator = torch.Generator().manual_seed(0)
    narrow = torch.randn(rows, columns, generator=generator).bfloat16()
    x = torch.randn(tokens, columns, generator=generator)
    y, short = torch.empty(tokens, rows), x.bfloat16()
    linear = torch.nn.functional.linear
    packed, mkl = torch.ops.mkldnn, torch.ops.mkl
    options = (None, "none", [], "")

    def copies(weight: Tensor) -> list[Tensor]:
        return [weight.clone() for _ in range(num_copies(weight))]

    halves, floats = copies(narrow), copies(narrow.float())
    reordered = {
        dtype: [packed._reorder_linear_weight(matrix, tokens) for matrix in weights]
        for dtype, weights in (("float32", floats), ("bfloat16", halves))
    }
    of_mkl = [mkl._mkl_reorder_linear_weight(matrix, tokens) for matrix in floats]
    found: dict[str, tuple[Call, int]] = {
        "float32": (lambda i: linear(x, floats[i]), 4),
        "implicit": (lambda i: _implicit(x, floats[i]), 4),
        "bfloat16": (lambda i: linear(short, halves[i]), 2),
        "packed float32": (lambda i: packed._linear_pointwise(x, reordered["float32"][i], *options), 4),
        "packed bfloat16": (lambda i: packed._linear_pointwise(short, reordered["bfloat16"][i], *options), 2),
        "mkl": (lambda i: mkl._mkl_linear(x, of_mkl[i], floats[i], None, tokens), 4),
    }
    for name, weights in (("C", halves), ("C float32", floats)):
        products = [
            Product(matrix.data_ptr(), None, rows, columns, KINDS[matrix.dtype]) for matrix in weights
        ]

        def in_c(i: int, products: list[Product] = products) -> None:
            library().kvferry_multiply(
                ctypes.addressof(products[i]), tokens, threads, x.data_ptr(), y.data_ptr()
            )

        found[name] = in_c, weights[0].element_size()
    return {name: (call, size * rows * columns) for name, (call, size) in found.items()}


def num_copies(weight: Tensor) -> int:
    return max(1, CACHED_BYTES // weight.nbytes)


def _implicit(x: Tensor, weight: Tensor) -> Tensor:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        return torch.nn.functional.linear(x, weight)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def times(calls: dict[str, tuple[Call, int]], seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """The median of each way's calls in seconds; at least three of each, one after another."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    begun_s, number = time.perf_counter(), 0
    while number < 4 or time.perf_counter() - begun_s < seconds * len(calls):
        for name, (call, size) in calls.items():
            copy = number % max(1, CACHED_BYTES // size)
            started_s = clock()
            call(copy)
            taken[name].append(clock() - started_s)
        number += 1
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


def copy_gb_per_s() -> float:
    """Bytes read and written a second by torch's copy of memory."""
    source, target = torch.ones(COPIED_BYTES // 4), torch.empty(COPIED_BYTES // 4)
    taken = []
    for _ in range(7):
        started_s = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started_s)
    return 2e-9 * COPIED_BYTES / statistics.median(taken)


def measure(
    columns: int, rows: int, tokens: int, threads: int, seconds: float, clock: Callable[[], float]
) -> dict[str, Any]:
    """One cell, all ways."""
    calls = ways(columns, rows, tokens, threads)
    cell: dict[str, Any] = {
        "columns": columns,
        "rows": rows,
        "tokens": tokens,
        "threads": threads,
        "ways": {},
    }
    for name, taken_s in times(calls, seconds, clock).items():
        cell["ways"][name] = {
            "ms": 1e3 * taken_s,
            "gflop_per_s": 2e-9 * columns * rows * tokens / taken_s,
            "weights_gb_per_s": 1e-9 * calls[name][1] / taken_s,
        }
    return cell


def line(cell: dict[str, Any]) -> str:
    """A cell as it is printed."""
    each = (f"{name} {way['ms']:.3f} ({way['gflop_per_s']:.0f})" for name, way in cell["ways"].items())
    where = f"{cell['tokens']:5} x {cell['columns']} x {cell['rows']}, {cell['threads']} threads"
    return f"{where}: ms (GFLOP/s): {'  '.join(each)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 64, 1024], help="tokens")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.3, help="of each way in each cell")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: the process's own time")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    cells, copies, clock = [], {}, CLOCKS[arguments.clock]
    with torch.inference_mode(False), torch.no_grad():
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            copies[threads] = copy_gb_per_s()
            sys.stdout.write(f"{threads} threads copy {copies[threads]:.1f} GB/s\n")
            for tokens in arguments.rows:
                for columns, rows in SHAPES:
                    if tokens * rows <= 64 * SHAPES[-1][1]:  # a prompt's logits are of one token
                        cells.append(measure(columns, rows, tokens, threads, arguments.seconds, clock))
                        sys.stdout.write(line(cells[-1]) + "\n")
                        sys.stdout.flush()
    if arguments.output is not None:
        result = {
            "command": "python benchmarks/cpu_products.py " + " ".join(sys.argv[1:]),
            "commit": commit(),
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "copy_gb_per_s": copies,
            "cells": cells,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
