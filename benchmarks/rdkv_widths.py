"""What RDKV's bit-widths are worth on the demo model: the ablation of the paper's Table 4.

    python benchmarks/rdkv_widths.py [--examples 100] [--tokens 1024] [--output FILE]

Each prompt is run once and compressed with every set of widths at every budget; the last prompt token is fed
again, so that every answer token sees the compressed cache. Measures the right answer's mean negative
log-likelihood, how often all of its tokens are the likeliest, and the squared error of the attention outputs
of the prompt's last query over their energy. Budgets that a set cannot keep to are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.trizone import trizone_decode_segments
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.oracle import CapturedPrompt, Continuation, OneProcessGenerator
from kvferry.tools.recall.tasks import TASKS

WIDTHS = {"joint": "0,2,4,8,16", "tri-state": "0,4,16", "evict-only": "0,16", "quant-only": "2,4,8,16"}
RETENTIONS = (0.01, 0.025, 0.0625, 0.125, 0.25)
TASK_NAMES = ("multi_key_8", "single_needle")
MAX_NEW_TOKENS = 20


def attention_error(spec: ModelSpec, captured: CapturedPrompt, continuation: Continuation) -> float:
    """Squared error of the last query's attention outputs over their energy, mean over layers."""
    errors = []
    formats = make_formats(spec, continuation.resolved)
    for inputs, fmt, tensors in zip(captured.layers, formats, continuation.compressed, strict=True):
        assert isinstance(fmt, Rdkv)
        query, none = inputs.queries[:, :, -1], inputs.keys[:, :0]
        exact = dense_decode(query, inputs.keys, inputs.values, scaling=inputs.scaling)
        output = trizone_decode_segments(query, (fmt.packed(tensors),), none, none, scaling=inputs.scaling)
        errors.append(float((output - exact).square().sum() / exact.square().sum()))
    return statistics.fmean(errors)


def measure(
    generator: OneProcessGenerator, spec: ModelSpec, task: str, seed: int, num_tokens: int
) -> dict[tuple[str, float], list[float]]:
    """NLL, exactness and attention error of one example, by widths and retention."""
    example = TASKS[task].example(num_tokens=num_tokens, seed=seed)
    prompt, answer = example.prompt_token_ids, example.answer_token_ids
    captured = generator.capture(prompt).prefix(len(prompt) - 1)
    results = {}
    for name, widths in WIDTHS.items():
        for retention in RETENTIONS:
            plan = plan_for("rdkv", budget=Budget(retention=retention), overrides={"widths": widths})
            try:
                continuation = generator.compress(captured, plan=plan, max_new_tokens=MAX_NEW_TOKENS)
            except InvalidRequest:
                continue
            error = attention_error(spec, captured, continuation)
            logits = torch.stack([continuation.step(token) for token in (prompt[-1], *answer[:-1])])
            nll = -logits.log_softmax(-1)[range(len(answer)), answer].mean()
            exact = logits.argmax(-1).tolist() == answer
            results[name, retention] = [float(nll), float(exact), error]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100, help="of each task")
    parser.add_argument("--tokens", type=int, default=1024, help="prompt length")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    model = load_model("demo", name="demo", device="cpu")
    generator = OneProcessGenerator(model)
    with torch.inference_mode():
        measured = {
            task: [
                measure(generator, model.spec, task, seed, arguments.tokens)
                for seed in range(arguments.examples)
            ]
            for task in TASK_NAMES
        }
    cells = []
    for task, examples in measured.items():
        for name, retention in dict.fromkeys(key for example in examples for key in example):
            figures = [example[name, retention] for example in examples]
            nll, exact, error = (statistics.fmean(column) for column in zip(*figures, strict=True))
            cells.append(
                {
                    "task": task,
                    "widths": name,
                    "retention": retention,
                    "nll": nll,
                    "exact": exact,
                    "attention_error": error,
                }
            )
            sys.stdout.write(
                f"{task:14} {name:10} {retention:7.2%}  NLL {nll:7.4f}  exact {exact:6.1%}  "
                f"attention error {error:.5f}\n"
            )
    if arguments.output:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        ).stdout.strip()
        result = {
            "command": (
                f"python benchmarks/rdkv_widths.py --examples {arguments.examples} "
                f"--tokens {arguments.tokens}"
            ),
            "commit": commit,
            "torch": torch.__version__,
            "cells": cells,
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
