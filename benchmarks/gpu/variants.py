"""A layer's kernels with other constants and launch options, in steps of a few layers of a random model.

    python benchmarks/gpu/variants.py --methods rdkv --cells 1x131072 8x32768 \\
        --set trizone.work_list:MIN_ITEM_BYTES=2048 \\
        --option trizone.triton_kernel:_trizone_kernel.num_stages=1

`--set` replaces a constant of a module of kernels, and `--option` an option of a kernel's launches. Prints
the microseconds of each Triton kernel, and writes them with --output. --check runs a tiny step in the
interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

NUM_LAYERS, NUM_STEPS = 4, 150
CASE_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="Llama-3.1-8B", help="shape of the layers")
    parser.add_argument("--methods", nargs="+", default=["rocketkv", "rdkv"])
    parser.add_argument("--cells", nargs="+", default=["1x131072", "8x32768"], help="BATCHxCONTEXT")
    parser.add_argument("--set", nargs="*", default=[], metavar="MODULE:NAME=NUMBER")
    parser.add_argument("--option", nargs="*", default=[], metavar="MODULE:KERNEL.OPTION=NUMBER")
    parser.add_argument("--check", action="store_true", help="tiny, in the interpreter; no GPU")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    if arguments.check:
        os.environ["TRITON_INTERPRET"] = "1"
    for text in arguments.set:
        module, _, assigned = text.partition(":")
        name, _, number = assigned.partition("=")
        replace_constant(importlib.import_module(f"kvferry.kernels.{module}"), name, int(number))
    for text in arguments.option:
        module, _, assigned = text.partition(":")
        kernel, _, option = assigned.partition(".")
        name, _, number = option.partition("=")
        add_option(importlib.import_module(f"kvferry.kernels.{module}"), kernel, name, int(number))
    rows = measured(arguments)
    result = {"command": ["benchmarks/gpu/variants.py", *sys.argv[1:]], "rows": rows}
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def replace_constant(module: Any, name: str, number: int) -> None:
    """Replace a constant where it is looked up, and where it is a parameter's default."""
    former = getattr(module, name)
    setattr(module, name, number)
    for function in vars(module).values():
        defaults = getattr(function, "__kwdefaults__", None) or {}
        defaults.update({key: number for key, value in defaults.items() if value is former})


def add_option(module: Any, kernel_name: str, name: str, number: int) -> None:
    """Give all launches of a kernel this option."""
    kernel = getattr(module, kernel_name)
    run = kernel.run
    kernel.run = lambda *args, **options: run(*args, **{**options, name: number})


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each method in each cell: the microseconds of a launch of each kernel."""
    from decode_cases import GPU_GRID, TINY_GRID, DecodeBench, DecodeCase, refuse
    from shapes import TINY_SHAPES
    from timing import CudaClock, HostClock

    from kvferry.kernels import dispatch
    from kvferry.tools.kernel_cache.random_model import random_model
    from kvferry.tools.kernel_cache.shapes import SHIPPED

    clock = HostClock() if arguments.check else CudaClock()
    dispatch.configure("triton" if arguments.check else "auto", clock.device)
    grid = TINY_GRID if arguments.check else replace(GPU_GRID, max_steps=NUM_STEPS)
    shape = TINY_SHAPES[0] if arguments.check else SHIPPED[arguments.model]
    cells = [(1, 40)] if arguments.check else [tuple(map(int, cell.split("x"))) for cell in arguments.cells]
    longest = max(context for _, context in cells) + 2 * NUM_STEPS
    model = random_model(
        replace(shape, num_layers=min(NUM_LAYERS, shape.num_layers), vocab_size=min(shape.vocab_size, 2048)),
        clock.device,
        max_model_len=longest,
    )
    methods = {method.name: method for method in grid.methods}
    rows = []
    for name in arguments.methods:
        for batch, context in cells:
            bench = DecodeBench(model, clock, grid, seed=1)
            row = bench.measure(DecodeCase(method=methods[name], context=context, batch_size=batch), CASE_S)
            if row["path"] != "graph":
                refuse(f"{name} took the path {row['path']}")
            row["us"] = {each["name"]: each["us"] / each["count"] for each in bench.profile()}
            rows.append({**row, "set": arguments.set, "option": arguments.option})
            own = {kernel: round(us, 2) for kernel, us in row["us"].items() if kernel.startswith("_")}
            sys.stdout.write(f"{batch} x {context} {name}: {own}\n")
    return rows


if __name__ == "__main__":
    sys.exit(main())
