"""Kernels against their references and targets, decode and prefill end to end: `python benchmarks/gpu`.

    python benchmarks/gpu                   all of it on a GPU, in at most 8 minutes
    python benchmarks/gpu --parts kernels   check every kernel on fresh random inputs, then time it
    python benchmarks/gpu --parts decode --models Llama-3.1-8B --cells 1x32768 --methods full rocketkv
    python benchmarks/gpu --check           all of it at tiny shapes, kernels in Triton's interpreter; no GPU
    python benchmarks/gpu --compile         compile every kernel for sm_80 and sm_90, or others; no GPU
    python benchmarks/gpu --roofline        modelled times of whole decode steps; no GPU

Downloads nothing; weights and inputs are random. Prints tables; --output writes JSON, --markdown the tables,
--plots PNG files. A kernel that differs from its reference or is quarantined, steps that are not captured and
should be, tokens that part, or a case that fails end the run with status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from record import Record

LIMIT_S = 480.0
PARTS = ("kernels", "tokens", "decode", "prefill")
OTHER_PARTS = ("op_checks", "peers")
"""Those that are run where they are named: the self-test's cases, and transformers' own steps."""


def main() -> int:
    arguments = _arguments()
    # Read when a kernel is decorated, so before anything imports Triton.
    if arguments.check or arguments.roofline:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    _find_package()
    from record import Record

    record = Record(arguments.output)
    record.fields["seed"] = time.time_ns() % 2**31 if arguments.seed is None else arguments.seed
    if arguments.roofline:
        from roofline import roofline

        record.fields |= {"mode": "roofline", **roofline()}
    elif arguments.compile:
        _compile(record.fields, arguments)
    else:
        _run(record, arguments)
    _write(record, arguments)
    return 1 if record.fields["failures"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="tiny shapes, kernels in the interpreter")
    mode.add_argument("--compile", action="store_true", help="compile only")
    mode.add_argument("--roofline", action="store_true", help="modelled times of decode steps")
    parser.add_argument(
        "--parts", nargs="*", choices=(*PARTS, *OTHER_PARTS), default=PARTS, help="what to run"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds in which the run ends")
    parser.add_argument("--only", default="", help="with --compile: kernels whose name holds this")
    parser.add_argument("--models", nargs="*", default=(), help="shapes of these names")
    parser.add_argument("--methods", nargs="*", default=(), help="of tokens, decode and prefill")
    parser.add_argument(
        "--cells", nargs="*", default=(), type=_cell, help="of decode: BATCHxCONTEXT, such as 8x32768"
    )
    parser.add_argument(
        "--architectures", nargs="*", default=("sm_80", "sm_90"), help="with --compile: those to compile for"
    )
    parser.add_argument("--seed", type=int, help="of the random inputs; the time if not given")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    parser.add_argument("--plots", type=Path, help="folder for plots")
    return parser.parse_args()


def _cell(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    return int(batch), int(context)


def _find_package() -> None:
    """Where kvferry is not installed, its packages are this repository's folders."""
    if importlib.util.find_spec("kvferry") is None:
        package = types.ModuleType("kvferry")
        package.__path__ = [str(Path(__file__).parents[2])]
        sys.modules["kvferry"] = package


def _compile(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    import triton
    from compile_only import compile_all
    from report import write_table

    # lines of the source are looked up, and Triton's cache may hold code from a copy of it elsewhere
    triton.knobs.compilation.always_compile = True
    rows = compile_all(arguments.only, tuple(arguments.models), tuple(arguments.architectures))
    columns = (
        "kernel",
        "arch",
        "model",
        "special",
        "registers",
        "stack_bytes",
        "shared_bytes",
        "wide_loads",
        "int_to_float",
    )
    write_table(rows, columns)
    result |= {"mode": "compile", "triton": triton.__version__, "kernels": rows}
    result["failures"] += [
        " ".join(filter(None, (r["kernel"], r["arch"], r["model"], r.get("special"))))
        + f": {'; '.join(r['breaks'])}"
        for r in rows
        if r["breaks"]
    ]


def _run(record: Record, arguments: argparse.Namespace) -> None:
    import torch

    if arguments.check:
        from interpreter import interpreter_problem

        problem = interpreter_problem()
    else:
        has_device = torch.cuda.is_available()
        problem = None if has_device else "there is no CUDA device; --check and --compile need none"
    if problem is not None:
        record.fail(problem)
        return
    from runs import Options, Run
    from time_limit import TimeLimit
    from timing import CudaClock, HostClock

    from kvferry.kernels import dispatch
    from kvferry.kernels.quarantine import on_quarantine

    clock = HostClock() if arguments.check else CudaClock()
    record.fields["mode"] = "interpreter" if arguments.check else "gpu"
    if clock.device.type == "cuda":
        record.fields["device"] = torch.cuda.get_device_properties(0).name
    dispatch.configure("triton" if arguments.check else "auto", clock.device)
    limit = TimeLimit(arguments.limit_s, lambda: _write(record, arguments))
    options = Options(
        seed=record.fields["seed"], is_tiny=arguments.check, models=tuple(arguments.models),
        methods=tuple(arguments.methods), cells=tuple(arguments.cells),
    )  # fmt: skip
    run = Run(record, clock, limit, options)
    on_quarantine(run.quarantined)
    run.run(arguments.parts)
    limit.done()
    if clock.device.type == "cuda":
        from roofline import add_modelled

        add_modelled(record.fields)


def _write(record: Record, arguments: argparse.Namespace) -> None:
    """Everything there is, in every form that was asked for."""
    from report import COLUMNS, markdown, write_table

    result = record.fields
    if result.get("mode") == "roofline":
        sys.stdout.write(f"{result['model']}: modelled, not measured\n")
    if result.get("mode") != "compile":
        for name, columns in COLUMNS.items():
            if result.get(name):
                sys.stdout.write(f"\n{name}\n")
                write_table(result[name], columns)
    record.save()
    if arguments.markdown:
        arguments.markdown.write_text(markdown(result))
    if arguments.plots:
        from plots import draw

        draw(result, arguments.plots)
    for failure in result["failures"]:
        sys.stderr.write(f"FAILED {failure}\n")


if __name__ == "__main__":
    sys.exit(main())
