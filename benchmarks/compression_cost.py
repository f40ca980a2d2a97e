"""Compression time as a share of prefill on the CPU.

    python benchmarks/compression_cost.py [--lengths 4096 8192] [--rounds 7] [--threads N]
        [--task NAME] [--methods NAME ...] [--output FILE]

The demo model runs a prompt; then each method compresses all layers of that prompt. Prefill and the methods
alternate, so that other work of the machine slows all of them alike. Times are the process's own CPU time:
medians of one run, the first round not counted. The demo model is small, and compression takes a larger share
of a small model's prefill: its cost per layer does not depend on the model's width. A draft ends where the
answer does, so `rdkv-draft` drafts all its tokens only of a task with a long answer. `kvzip` and `kvzip-rdkv`
repeat the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cpu_decode import commit, cpu_name

from kvferry.shared.compression.draft import greedy, run_draft
from kvferry.shared.compression.plan import ParamValue, num_draft_tokens
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.reconstruct import reconstruct
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.checkpoint import resolve_model_path
from kvferry.shared.model.loading import load_model
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator, compress_prompt
from kvferry.tools.recall.tasks import TASKS

BOUNDS = {"snapkv": 0.03, "rocketkv": 0.03, "compactor": 0.06, "rdkv": 0.10}
"""The largest share of prefill that a method may take; those of `--methods` have none."""
TASK = "multi_key_8"
ANSWER_TOKENS = 64
"""Left free in the model's window."""


def compression(model: TransformersModel, captured: CapturedPrompt, method: str) -> Callable[[], object]:
    """A call that repeats the prompt, where the method does, and compresses it with the budget of a method,
    perhaps NAME:PARAMETER=VALUE; a draft, whose tokens are the answer's own, is there before."""
    spec, (name, *changes) = model.spec, method.split(":")
    overrides: dict[str, ParamValue] = {}
    for change in changes:
        parameter, _, value = change.partition("=")
        overrides[parameter] = int(value) if value.isdecimal() else value
    resolved = resolve_plan(
        plan_for(name, overrides=overrides),
        num_prompt_tokens=len(captured.token_ids),
        max_new_tokens=ANSWER_TOKENS,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
    )
    assert resolved.method == name, f"{method} has nothing to compress"
    num_draft, logits = num_draft_tokens(resolved), captured.logits
    assert logits is not None

    drafted = captured.layers
    if num_draft:
        drafted = run_draft(model, drafted, logits=logits, draw=greedy(spec, num_draft)).layers

    def compress() -> None:
        layers = reconstruct(model, resolved, drafted, token_ids=captured.token_ids)
        compress_prompt(spec, resolved, layers)

    return compress


def measure(
    model: TransformersModel, task: str, num_tokens: int, rounds: int, methods: Sequence[str]
) -> dict[str, Any]:
    """The medians of one prompt length, in milliseconds, and each method's share of prefill."""
    longest = model.spec.max_model_len - ANSWER_TOKENS
    example = TASKS[task].example(num_tokens=min(num_tokens, longest), seed=0)
    prompt, generator = example.prompt_token_ids, OneProcessGenerator(model)
    captured = generator.capture(prompt)
    calls: dict[str, Callable[[], object]] = {"prefill": lambda: generator.capture(prompt)}
    calls |= {method: compression(model, captured, method) for method in methods}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started_s = time.process_time()
            call()
            if number:
                taken[name].append(1e3 * (time.process_time() - started_s))
    medians_ms = {name: statistics.median(times) for name, times in taken.items()}
    shares = {method: medians_ms[method] / medians_ms["prefill"] for method in methods}
    return {"tokens": len(prompt), "cpu_ms": medians_ms, "share_of_prefill": shares}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192], help="prompt tokens")
    parser.add_argument("--methods", nargs="+", default=[*BOUNDS], help="NAME or NAME:PARAMETER=VALUE")
    parser.add_argument("--task", choices=TASKS, default=TASK, help="what the prompt asks")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    parser.add_argument("--threads", type=int, default=1, help="torch's")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measured_at = commit()  # the checkout may move on during the run
    model = load_model(resolve_model_path("demo", weights=True), name="demo", device="cpu")
    cells = []
    with torch.inference_mode():
        for num_tokens in arguments.lengths:
            cells.append(
                cell := measure(model, arguments.task, num_tokens, arguments.rounds, arguments.methods)
            )
            shares = "  ".join(
                f"{name} {100 * share:.1f} %" for name, share in cell["share_of_prefill"].items()
            )
            prefill_ms = cell["cpu_ms"]["prefill"]
            sys.stdout.write(f"{cell['tokens']:6} tokens  prefill {prefill_ms:8.1f} ms  {shares}\n")
            sys.stdout.flush()
    if arguments.output:
        asked = "" if arguments.task == TASK else f" --task {arguments.task}"
        chosen = "" if arguments.methods == [*BOUNDS] else f" --methods {' '.join(arguments.methods)}"
        result = {
            "command": (
                f"python benchmarks/compression_cost.py --lengths {' '.join(map(str, arguments.lengths))} "
                f"--rounds {arguments.rounds} --threads {arguments.threads}{asked}{chosen}"
            ),
            "commit": measured_at,
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "bounds": BOUNDS,
            "cells": cells,
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
