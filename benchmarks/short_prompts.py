"""What two ways of serving short prompts could gain at most: prefilling them at decode, and batching them.

    python benchmarks/short_prompts.py [--repeats 20] [--output FILE]

Trip: `kvferry serve` with its services as processes, and with `--in-process`, where no KV leaves the process.
The difference of their times to the first token is what the trip costs, and so the most that a prefill at
decode could save; that of the second token is what shipping the blocks costs after it.

Batching: one pass over 2, 4, 8 and 16 times as many tokens, beside as many passes. A batch of prompts attends
to fewer tokens than one long prompt, so it is counted without attention: the model's projections only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from kvferry.models import DEMO_MODEL
from kvferry.tools.bench.serving import served

PROMPTS = (16, 64, 128, 256, 512)
BATCHES = (2, 4, 8, 16)
MAX_TOKENS = 8
TIMEOUT_S = 60.0


def ask(client: httpx.Client, num_tokens: int, seed: int) -> dict[str, float]:
    """Milliseconds to the first token, from there to the second one, and of prefill's pass."""
    numbers = random.Random(seed)
    body = {
        "model": "demo", "prompt": [numbers.randrange(10, 400) for _ in range(num_tokens)],
        "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    arrived_s, kv = [time.perf_counter()], {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrived_s.append(time.perf_counter())
                kv = json.loads(line[6:]).get("kv", kv)
    first_ms, second_ms = (1000 * (arrived_s[i + 1] - arrived_s[i]) for i in range(2))
    return {"first_ms": first_ms, "second_ms": second_ms, "prefill_ms": kv["prefill_ms"]}


def trips(repeats: int) -> list[dict[str, Any]]:
    """Medians by prompt length, of both ways of serving in turn."""
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(
                httpx.Client(
                    base_url=stack.enter_context(served(*options))["url"], timeout=TIMEOUT_S, trust_env=False
                )
            )
            for name, options in (("processes", ()), ("in_process", ("--in-process",)))
        }
        for repeat in tqdm(range(-2, repeats), desc="trips"):  # two to warm up
            for num_tokens in PROMPTS:
                for name, client in clients.items():
                    found = ask(client, num_tokens, seed=1000 * (repeat + 2) + num_tokens)
                    if repeat >= 0:
                        runs.setdefault((num_tokens, name), []).append(found)
    rows = []
    for num_tokens in PROMPTS:
        row: dict[str, Any] = {"prompt_tokens": num_tokens}
        for name in clients:
            measured = runs[num_tokens, name]
            row[name] = {key: statistics.median(run[key] for run in measured) for key in measured[0]}
        row["trip_ms"] = row["processes"]["first_ms"] - row["in_process"]["first_ms"]
        rows.append(row)
    return rows


def best_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - begin_s))
    return statistics.median(times)


def batches(repeats: int) -> list[dict[str, Any]]:
    """The projections of many prompts' tokens in one pass, over those of one prompt at a time."""
    torch.set_num_threads(1)
    layers = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).model.layers
    linears = [module for module in layers.modules() if isinstance(module, torch.nn.Linear)]

    def project(inputs: dict[int, Tensor]) -> None:
        for linear in linears:
            linear(inputs[linear.in_features])

    rows = []
    with torch.inference_mode():
        for num_tokens in tqdm(PROMPTS, desc="batches"):
            widths = {linear.in_features for linear in linears}
            row: dict[str, Any] = {"prompt_tokens": num_tokens, "time_over_alone": {}}
            alone = {width: torch.randn(num_tokens, width) for width in widths}
            alone_ms = best_ms(lambda alone=alone: project(alone), repeats)
            for count in BATCHES:
                packed = {width: torch.randn(count * num_tokens, width) for width in widths}
                packed_ms = best_ms(lambda packed=packed: project(packed), repeats)
                row["time_over_alone"][count] = packed_ms / (count * alone_ms)
            rows.append(row | {"alone_ms": alone_ms})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    measured = {"trips": trips(options.repeats), "batches": batches(options.repeats)}
    figures = {name: {str(row["prompt_tokens"]): row for row in rows} for name, rows in measured.items()}
    for row in figures["trips"].values():
        apart, together = row["processes"], row["in_process"]
        sys.stdout.write(
            f"{row['prompt_tokens']:>4} tokens: first {apart['first_ms']:.1f} ms in processes,"
            f" {together['first_ms']:.1f} in one: the trip takes {row['trip_ms']:.1f}; second"
            f" {apart['second_ms']:.1f} and {together['second_ms']:.1f} ms later;"
            f" prefill {apart['prefill_ms']:.1f}\n"
        )
    for row in figures["batches"].values():
        ratios = ", ".join(f"{count}: {ratio:.2f}" for count, ratio in row["time_over_alone"].items())
        sys.stdout.write(f"{row['prompt_tokens']:>4} tokens: time of a batch over one by one, {ratios}\n")
    if options.output:
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        result = {
            "command": sys.argv,
            "machine": machine,
            **figures,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
