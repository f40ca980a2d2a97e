"""Kernels against their references and their targets: `python benchmarks/gpu`, on a GPU, in under 8 minutes.

    python benchmarks/gpu                   check every kernel on fresh random inputs, then time it
    python benchmarks/gpu --check           check every kernel in Triton's interpreter, at tiny shapes; no GPU
    python benchmarks/gpu --compile         compile every kernel for sm_80 and sm_90; no GPU

Downloads nothing; weights and inputs are random. Prints a table, and writes JSON with --output. A kernel that
differs from its reference ends the run with status 1 and no times. End to end decoding is measured elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    arguments = _arguments()
    # Read when a kernel is decorated, so before anything imports Triton.
    if arguments.check:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    seed = time.time_ns() % 2**31 if arguments.seed is None else arguments.seed
    if arguments.compile:
        result = _compile(arguments.only, tuple(arguments.models))
    elif arguments.check:
        result = _check(seed)
    else:
        result = _measure(seed)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")
    failures = result["failures"]
    for failure in failures:
        sys.stderr.write(f"FAILED {failure}\n")
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="in the interpreter, at tiny shapes")
    mode.add_argument("--compile", action="store_true", help="compile only, for sm_80 and sm_90")
    parser.add_argument("--only", default="", help="with --compile: kernels whose name holds this")
    parser.add_argument("--models", nargs="*", default=(), help="with --compile: shapes of these names")
    parser.add_argument("--seed", type=int, help="of the random inputs; the time if not given")
    parser.add_argument("--output", help="file for the results as JSON")
    return parser.parse_args()


def _check(seed: int) -> dict[str, Any]:
    import torch
    from cases import tiny_cases

    rows = [_checked(case) for case in tiny_cases(torch.device("cpu"), seed)]
    return _report("interpreter", seed, rows, ("kernel", "model", "shape", "error", "tolerance"))


def _compile(only: str, models: tuple[str, ...]) -> dict[str, Any]:
    import triton
    from compile_only import compile_all

    rows = compile_all(only, models)
    columns = ("kernel", "arch", "model", "registers", "stack_bytes", "wide_loads", "int_to_float")
    _table(rows, columns)
    failures = [
        f"{r['kernel']} {r['arch']} {r['model']}: {'; '.join(r['breaks'])}" for r in rows if r["breaks"]
    ]
    return {"mode": "compile", "triton": triton.__version__, "kernels": rows, "failures": failures}


def _measure(seed: int) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"mode": "gpu", "failures": ["there is no CUDA device; --check and --compile need none"]}
    from cases import MODELS, gpu_cases
    from timing import bf16_flops_per_s, copy_bytes_per_s, time_us

    bandwidth, flops = copy_bytes_per_s(), bf16_flops_per_s()
    rows = []
    for model in MODELS:
        for make in gpu_cases(torch.device("cuda"), seed, model):
            case = make()
            row = _checked(case)
            if row["error"] <= row["tolerance"]:
                row["time_us"] = time_us(case.launch, captured=case.captured)
                row["bandwidth_fraction"] = case.num_bytes / (row["time_us"] * 1e-6) / bandwidth
                row["flops_fraction"] = case.flops / (row["time_us"] * 1e-6) / flops
            rows.append(row)
            del case
            torch.cuda.empty_cache()
    columns = (
        "row", "kernel", "model", "shape", "num_bytes", "time_us", "bandwidth_fraction", "flops_fraction",
        "target", "target_us",
    )  # fmt: skip
    result = _report("gpu", seed, rows, columns)
    device = torch.cuda.get_device_properties(0)
    return {**result, "device": device.name, "copy_bytes_per_s": bandwidth, "bf16_flops_per_s": flops}


def _checked(case: Any) -> dict[str, Any]:
    """A case's row with its error against the reference, relative to the reference's norm."""
    result, expected = case.launch().float(), case.expected().float()
    error = float((result - expected).norm() / expected.norm())
    row = {name: getattr(case, name) for name in ("row", "kernel", "model", "shape", "num_bytes")}
    return {
        **row,
        # NaN compares as neither less nor more
        "error": error if error == error else float("inf"),
        "tolerance": case.tolerance,
        "target": case.target,
        "target_us": case.target_us,
    }


def _report(mode: str, seed: int, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> dict[str, Any]:
    _table(rows, columns)
    failures = [
        f"{r['kernel']} {r['model']} {r['shape']}: error {r['error']:.2e}, allowed {r['tolerance']:.0e}, "
        f"seed {seed}"
        for r in rows
        if not r["error"] <= r["tolerance"]
    ]
    return {"mode": mode, "seed": seed, "kernels": rows, "failures": failures}


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    cells = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        sys.stdout.write("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
