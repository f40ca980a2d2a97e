"""Decode step time on the CPU: our methods against our own `full` and against transformers' SDPA.

    python benchmarks/cpu_decode.py [--models demo wide] [--contexts 2048 4096 8192] [--batch-sizes 1 4]
        [--methods rocketkv rdkv] [--steps 15] [--threads N] [--clock wall|cpu] [--output FILE]

All variants of one model, context and batch size alternate, a few steps at a time, so that other work of the
machine slows all of them alike. The first step after a change of variant, which finds another variant's code
and data in the caches, is not counted. A step is the model's forward pass with its attention and the
likeliest next token; transformers' is the same with its `DynamicCache`, without the rest of `generate`.
"demo" is the demo model with K and V of a prompt; "wide" has more and wider layers, of random weights, and
random K and V. A step's cost depends on their values only through RDKV's allocation. Medians of one run, in
milliseconds. On a shared machine, `--clock cpu --threads 1` counts the process's own CPU time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.services.decode.attention import BatchAttention, SlotAttention
from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.checkpoint import resolve_model_path
from kvferry.shared.model.loading import load_model
from kvferry.tools.oracle import OneProcessGenerator, compress_prompt
from kvferry.tools.recall.tasks import TASKS

METHODS = ("rocketkv", "rdkv")
"""Beside `full`."""
TRANSFORMERS = "transformers"
TURN_STEPS = 5
"""Steps of a variant that are counted before the next variant's."""
WIDE_SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 704,
    "max_position_embeddings": 16384,
}
NUM_WINDOW_QUERIES = 64
Step = Callable[[], None]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def wide_model_folder(parent: Path) -> Path:
    """Write a Llama of `WIDE_SHAPE` with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = parent / "wide"
    LlamaForCausalLM(LlamaConfig(**WIDE_SHAPE)).save_pretrained(folder)
    return folder


def demo_prompt(model: TransformersModel, num_tokens: int) -> tuple[LayerInputs, ...]:
    """The demo model's K and V of a prompt of its own kind: a shorter one's, and the last of them again."""
    longest = model.spec.max_model_len - 1
    example = TASKS["multi_key_8"].example(num_tokens=min(num_tokens, longest) - 64, seed=0)
    captured = OneProcessGenerator(model).capture(example.prompt_token_ids)
    missing = num_tokens - len(example.prompt_token_ids)

    def extend(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows[..., rows.shape[-2] - missing :, :]], dim=-2).contiguous()

    return tuple(
        replace(
            inputs,
            queries=inputs.queries[:, :, -NUM_WINDOW_QUERIES:],
            keys=extend(inputs.keys),
            values=extend(inputs.values),
        )
        for inputs in captured.layers
    )


def random_prompt(model: TransformersModel, num_tokens: int) -> tuple[LayerInputs, ...]:
    """Gaussian queries, K and V."""
    spec, generator = model.spec, torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, spec.head_dim, generator=generator)

    return tuple(
        LayerInputs(
            layer=layer,
            queries=rows(spec.num_kv_heads, spec.group_size, NUM_WINDOW_QUERIES),
            keys=rows(spec.num_kv_heads, num_tokens),
            values=rows(spec.num_kv_heads, num_tokens),
            scaling=spec.head_dim**-0.5,
        )
        for layer in range(spec.num_layers)
    )


def our_step(
    model: TransformersModel, prompt: tuple[LayerInputs, ...], method: str, *, batch_size: int, steps: int
) -> tuple[Step, int]:
    """A step of a batch as the decode engine takes it, and the bytes of one sequence's cache."""
    spec, num_tokens = model.spec, prompt[0].keys.shape[1]
    resolved = resolve_plan(
        plan_for(method),
        num_prompt_tokens=num_tokens,
        max_new_tokens=steps + 1,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
    )
    measured, compressed = compress_prompt(spec, resolved, prompt)
    layout = sequence_layout(make_formats(spec, measured))
    # one memory, as at decode: a batch is attended through offsets into it
    arena = torch.zeros(batch_size, layout.size_bytes, dtype=torch.uint8)
    batch = []
    for buffer in arena:
        layers = zip(layout.layers, compressed, strict=True)
        batch.append(tuple(layer.place(buffer, tensors) for layer, tensors in layers))
    token_ids = torch.full((batch_size,), 7)
    num_appended = 0
    slots = SlotAttention(spec, batch_size, arena)
    for slot, caches in enumerate(batch):
        slots.place(slot, caches, 0)
    attention = BatchAttention(slots, batch_size)
    active = torch.ones(batch_size, dtype=torch.int64)

    def step() -> None:
        nonlocal num_appended, token_ids
        positions = torch.full((batch_size,), min(num_tokens + num_appended, spec.max_model_len - 1))
        token_ids = model.decode(token_ids, positions, attention=attention).argmax(-1)
        for error in slots.errors.values():
            raise error
        num_appended += 1
        attention.advance(active)

    return step, sum(cache.used_bytes(0) for cache in batch[0])


def transformers_step(
    network: Any, prompt: tuple[LayerInputs, ...], *, batch_size: int, max_position: int
) -> Step:
    """A step of the unmodified model with its own cache and SDPA."""
    from transformers import DynamicCache

    past = DynamicCache()
    for layer, inputs in enumerate(prompt):
        rows = (inputs.keys, inputs.values)
        past.update(*(tensor.expand(batch_size, -1, -1, -1).contiguous() for tensor in rows), layer)
    token_ids = torch.full((batch_size, 1), 7)

    def step() -> None:
        nonlocal token_ids
        position = torch.full((batch_size, 1), min(past.get_seq_length(), max_position))
        output = network(
            input_ids=token_ids, position_ids=position, past_key_values=past, use_cache=True, logits_to_keep=1
        )
        token_ids = output.logits[:, -1].argmax(-1, keepdim=True)

    return step


def measure(variants: dict[str, Step], steps: int, clock: Callable[[], float]) -> dict[str, float]:
    """The median of so many steps of each variant in milliseconds."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for done in range(0, steps, TURN_STEPS):
        for name, step in variants.items():
            step()
            for _ in range(min(TURN_STEPS, steps - done)):
                started_s = clock()
                step()
                taken[name].append(1e3 * (clock() - started_s))
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_model(name: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every context and batch size of one model."""
    from transformers import AutoModelForCausalLM

    model = load_model(folder, name=name, device="cpu")
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    cells = []
    total_steps = arguments.steps + math.ceil(arguments.steps / TURN_STEPS)
    for num_tokens in arguments.contexts:
        prompt = (demo_prompt if name == "demo" else random_prompt)(model, num_tokens)
        for batch_size in arguments.batch_sizes:
            ours = {
                method: our_step(model, prompt, method, batch_size=batch_size, steps=total_steps)
                for method in ("full", *arguments.methods)
            }
            variants = {method: step for method, (step, _) in ours.items()}
            variants[TRANSFORMERS] = transformers_step(
                network, prompt, batch_size=batch_size, max_position=model.spec.max_model_len - 1
            )
            medians_ms = measure(variants, arguments.steps, CLOCKS[arguments.clock])
            cell: dict[str, Any] = {
                "model": name,
                "context": num_tokens,
                "batch_size": batch_size,
                "step_ms": medians_ms,
                "speedup_over_full": {m: medians_ms["full"] / medians_ms[m] for m in arguments.methods},
                "full_speedup_over_transformers": medians_ms[TRANSFORMERS] / medians_ms["full"],
                "cache_bytes": {method: size_bytes for method, (_, size_bytes) in ours.items()},
            }
            cells.append(cell)
            sys.stdout.write(line(cell) + "\n")
            sys.stdout.flush()
    return cells


def line(cell: dict[str, Any]) -> str:
    """A cell as it is printed."""
    times = " ".join(f"{name} {ms:8.2f}" for name, ms in cell["step_ms"].items())
    ratios = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in cell["speedup_over_full"].items())
    where = f"{cell['model']:5} {cell['context']:6} tokens x {cell['batch_size']}"
    return (
        f"{where}  ms: {times}  over full: {ratios}"
        f"  full over transformers: {cell['full_speedup_over_transformers']:.2f}x"
    )


def cpu_name() -> str:
    """The CPU's name as the kernel reports it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")), "unknown")


def commit() -> str:
    """The checkout's commit, with "+" where it has changes."""
    found = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty=+"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return found.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("demo", "wide"), default=["demo", "wide"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 4096, 8192], help="tokens")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="beside full")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch's")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: the process's own time")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cells = []
    with torch.inference_mode(), tempfile.TemporaryDirectory() as parent:
        for name in arguments.models:
            folder = (
                resolve_model_path("demo", weights=True)
                if name == "demo"
                else wide_model_folder(Path(parent))
            )
            cells += measure_model(name, folder, arguments)
    if arguments.output:
        result = {
            "command": (
                f"python benchmarks/cpu_decode.py --models {' '.join(arguments.models)} --contexts "
                f"{' '.join(map(str, arguments.contexts))} --batch-sizes "
                f"{' '.join(map(str, arguments.batch_sizes))} --methods {' '.join(arguments.methods)} "
                f"--steps {arguments.steps} --threads "
                f"{arguments.threads} --clock {arguments.clock}"
            ),
            "commit": commit(),
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "cells": cells,
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
