"""Host time of joining and leaving a running batch, in the shape of Llama 8B.

    python benchmarks/placing.py [--batch-sizes 1 8 32] [--repeats 30] [--output FILE]

A join writes a sequence's descriptors, sampling parameters and last token to its slot; a leave empties the
slot. Both are the decode service's own (`StepRunner`), with the descriptors that the GPU kernels read. The
tables are in host memory here and nothing is attended, so a CPU is enough; the model is its shape only. Times
are process time of one thread, in milliseconds: median and least of one sequence that joins and leaves
beside the others. On a busy machine the least is closer to what an idle one takes. Ends with an error if a
median is more than LIMIT_MS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from kvferry.kernels import dispatch
from kvferry.kernels.packed.layout import LAYOUT_VERSION
from kvferry.kernels.packed.packing import pack_layer
from kvferry.services.decode.slots import StepRunner
from kvferry.services.decode.step import StepInput
from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.formats.kivi import Kivi
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.plan import Budget, ResolvedPlan
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.device.step_device import StepDevice
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler

SPEC = ModelSpec(
    name="llama-8b",
    fingerprint="shape",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_model_len=131072,
    dtype="bfloat16",
    eos_token_ids=(2,),
)
METHODS = {
    "dense (full)": "full", "hsa (rocketkv)": "rocketkv", "trizone (rdkv)": "rdkv", "kivi (kivi)": "kivi",
}  # fmt: skip
"""One of each batched attention."""
CONTEXT, TOKEN_BUDGET, NEW_TOKENS = 4096, 1024, 256
LIMIT_MS = 2.0
"""The most that a join or a leave may take."""


@dataclass(frozen=True)
class Shape:
    """What placing needs of a model."""

    spec: ModelSpec = SPEC
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def resolved_plan(method: str, spec: ModelSpec, *, context: int, budget: int) -> ResolvedPlan:
    return resolve_plan(
        plan_for(method, budget=Budget(tokens=budget) if preset(method).takes_budget else None),
        num_prompt_tokens=context,
        max_new_tokens=NEW_TOKENS,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
    )


def make_sequence(resolved: ResolvedPlan, spec: ModelSpec) -> tuple[LayerCache, ...]:
    """A sequence whose layers are as the receiver leaves them. It takes all slots, which costs the same."""
    layout = sequence_layout(make_formats(spec, resolved))
    # never written, so that the system gives no memory for it
    arena = torch.empty(layout.size_bytes, dtype=torch.uint8)
    packed: dict[str, Any] = {}
    caches = []
    for layer in layout.layers:
        if isinstance(layer.format, Rdkv):
            packed = packed or _packed_prompt(spec)
            caches.append(layer.place(arena, packed))
        elif isinstance(layer.format, Kivi):
            specs = layer.format.tensors().items()
            tensors = {
                name: torch.ones(tensor_spec.shape, dtype=tensor_spec.dtype) for name, tensor_spec in specs
            }
            caches.append(layer.place(arena, tensors))
        else:
            caches.append(layer.format.open(layer.views(arena), {}))
    return tuple(caches)


def _packed_prompt(spec: ModelSpec) -> dict[str, Any]:
    """Tokens of mixed widths that fit the budget, packed. What the numbers are does not matter here."""
    generator = torch.Generator().manual_seed(0)
    widths = torch.tensor([2, 4, 4, 8, 16], dtype=torch.uint8)
    size = (spec.num_kv_heads, TOKEN_BUDGET)
    keys, values = torch.randn(2, *size, spec.head_dim, generator=generator)
    key_bits, value_bits = (
        widths[torch.randint(len(widths), (spec.num_kv_heads, n), generator=generator)]
        for n in (spec.head_dim, TOKEN_BUDGET)
    )
    packed = pack_layer(keys, values, key_bits, value_bits)
    counts = [count for head in packed.layout.heads for count in (*head.channels, *head.tokens)]
    parts = packed.layout.kinds.items()
    tensors = {name: packed.buffer[start : start + size_bytes] for name, (start, size_bytes) in parts}
    return {"layout": torch.tensor([LAYOUT_VERSION, *counts], dtype=torch.int32), **tensors}


def step_input(caches: tuple[LayerCache, ...], spec: ModelSpec) -> StepInput:
    return StepInput(
        caches=caches,
        num_appended=0,
        token_id=1,
        position=CONTEXT,
        num_left=NEW_TOKENS - 1,
        stop_ids=frozenset(spec.eos_token_ids),
        sampler=SequenceSampler(
            SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0), (1,), spec.vocab_size
        ),
    )


def measure(method: str, batch_sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    resolved = resolved_plan(method, SPEC, context=CONTEXT, budget=TOKEN_BUDGET)
    dispatch.configure("torch", Shape().device)
    caches = make_sequence(resolved, SPEC)
    # descriptors are only written if a Triton kernel would read them
    dispatch.configure("triton", Shape().device)
    inputs = [step_input(caches, SPEC) for _ in range(max(batch_sizes))]
    rows = []
    for batch_size in batch_sizes:
        runner = StepRunner(
            cast(LanguageModel, Shape()), StepDevice(), max_batch_size=max(batch_sizes), warn=sys.exit
        )
        for given in inputs[: batch_size - 1]:
            runner.join(given)
        times: dict[str, list[float]] = {"join_ms": [], "leave_ms": []}
        for _ in range(repeats + 1):
            began_s = time.process_time()
            slot = runner.join(inputs[batch_size - 1])
            joined_s = time.process_time()
            runner.leave(slot)
            times["join_ms"].append(1e3 * (joined_s - began_s))
            times["leave_ms"].append(1e3 * (time.process_time() - joined_s))
        medians = {name: round(statistics.median(values[1:]), 3) for name, values in times.items()}
        least = {f"least_{name}": round(min(values[1:]), 3) for name, values in times.items()}
        rows.append({"batch_size": batch_size, **medians, **least})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "1"
    results: dict[str, Any] = {}
    with torch.inference_mode():
        for name, method in METHODS.items():
            results[name] = measure(method, given.batch_sizes, given.repeats)
            for row in results[name]:
                sys.stdout.write(f"{name:16} {row}\n")
    if given.output:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        figures = {
            "commit": commit.stdout.strip(),
            "model": SPEC.name,
            "context": CONTEXT,
            "token_budget": TOKEN_BUDGET,
            "repeats": given.repeats,
            "limit_ms": LIMIT_MS,
            "methods": results,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(figures, indent=1) + "\n")
    late = beyond_limit(results)
    if late:
        raise SystemExit(f"more than {LIMIT_MS} ms: {', '.join(late)}")


def beyond_limit(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What takes more than LIMIT_MS, by the medians."""
    return [
        f"{name}, batch of {row['batch_size']}: {figure} {row[figure]}"
        for name, rows in results.items()
        for row in rows
        for figure in ("join_ms", "leave_ms")
        if row[figure] > LIMIT_MS
    ]


if __name__ == "__main__":
    main()
