"""What RDKV answers if it knows the answer: how much a selection loses because it sees only the question.

    python benchmarks/answer_queries.py [--examples 100] [--tokens 1024] [--output FILE]

Tokens are weighed by the attention of the right answer's own queries ("answer"), which no server has when it
selects, and as methods weigh them: by the question's attention (`rdkv`), by Compactor's scores
(`compactor-rdkv`) and by both (`rdkv-union`). The format, its widths, its pooling and its bytes are the same.
The first answer token comes from prefill, as served, and the right answer is fed; measures how often each of
its tokens is the likeliest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvferry.kernels.packed.packing import Packing
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.rdkv.allocation import allocate
from kvferry.shared.compression.rdkv.compress import begin_allocated, channel_weights, token_weights
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.evaluation.provenance import commit
from kvferry.tools.oracle import CapturedPrompt, Continuation, OneProcessGenerator
from kvferry.tools.recall.tasks import TASKS

METHODS = ("rdkv", "compactor-rdkv", "rdkv-union")
ANSWER = "answer"
SHARES = (0.025, 0.01)
TASK_NAMES = ("code_listing", "multi_key_8")


@dataclass(frozen=True, kw_only=True)
class Knowing(Rdkv):
    """`rdkv` with weights that are given. Attributes: weights: float32 `[H_kv, T]` of each layer."""

    weights: dict[int, Tensor]

    def begin(self, inputs: LayerInputs, scores: Tensor | None) -> Packing:
        settings, queries = self.settings, inputs.queries[:, :, -self.settings.window :]
        bits = allocate(
            self.weights[inputs.layer],
            channel_weights(queries, inputs.keys, variant=settings.channel_weights),
            budget_tokens=settings.budget_tokens,
            table=settings.table,
            widths=settings.widths,
        )
        return begin_allocated(settings, inputs, bits)


def answer_weights(model: LanguageModel, whole: CapturedPrompt, num_prompt: int) -> dict[int, Tensor]:
    """Each layer's weights of the prompt's tokens by the queries of the prompt's last token and the answer.

    Args: whole: the capture of prompt and answer.
    """
    num_queries = len(whole.token_ids) - num_prompt + 1
    return {
        inputs.layer: token_weights(
            inputs.queries[:, :, -num_queries:], inputs.keys, scaling=inputs.scaling, kernel_size=9
        )[:, :num_prompt]
        for inputs in whole.layers
    }


def compress_to(
    spec: ModelSpec, share: float, num_tokens: int, compress: Callable[[int], tuple[ResolvedPlan, list[Any]]]
) -> tuple[ResolvedPlan, list[Any]]:
    """With the largest budget whose bytes are at most this share of the full KV's.

    Args: compress: of a budget in tokens. Raises: ValueError: there is none.
    """
    most, best = share * spec.full_bytes(num_tokens), None
    low, high = 0, num_tokens
    while high - low > 1:
        budget = (low + high) // 2
        resolved, tensors = compress(budget)
        formats = make_formats(spec, resolved)
        kept = [fmt.kept_bytes(fmt.prompt_bytes(layer)) for fmt, layer in zip(formats, tensors, strict=True)]
        if sum(kept) <= most:
            low, best = budget, (resolved, tensors)
        else:
            high = budget
    if best is None:
        raise ValueError(f"{share:.1%} of {num_tokens} tokens hold nothing")
    return best


def measure(
    model: LanguageModel, generator: OneProcessGenerator, task: str, seed: int, num_tokens: int
) -> dict[tuple[str, float], float]:
    """Whether every token of the right answer is the likeliest (1 or 0), by what weighs and by share."""
    example = TASKS[task].example(num_tokens=num_tokens, seed=seed)
    prompt, answer = list(example.prompt_token_ids), list(example.answer_token_ids)
    whole = generator.capture([*prompt, *answer[:-1]])
    captured, weights = generator.capture(prompt), answer_weights(model, whole, len(prompt))
    counted = replace(model.spec, dtype="float16", checkpoint_dtype=None)
    assert captured.logits is not None
    first_is_right = int(captured.logits.argmax()) == answer[0]
    full = generator.compress(captured, plan=plan_for("full"), max_new_tokens=len(answer))
    results = {("full", 1.0): float(first_is_right and continues(full, answer))}
    for method in (*METHODS, ANSWER):
        for share in SHARES:

            def compress(budget: int, method: str = method) -> tuple[ResolvedPlan, list[Any]]:
                plan = plan_for("rdkv" if method == ANSWER else method, budget=Budget(tokens=budget))
                if method != ANSWER:
                    done = generator.compress(captured, plan=plan, max_new_tokens=len(answer))
                    return done.resolved, list(done.compressed)
                spec = model.spec
                resolved = resolve_plan(
                    plan,
                    num_prompt_tokens=len(prompt),
                    max_new_tokens=len(answer),
                    num_layers=spec.num_layers,
                    head_dim=spec.head_dim,
                    layers=spec.layers,
                )
                formats = make_formats(spec, resolved)
                knowing = [Knowing(**vars(fmt), weights=weights) for fmt in formats]
                layers = zip(knowing, captured.layers, strict=True)
                return resolved, [fmt.compress(inputs, None) for fmt, inputs in layers]

            resolved, tensors = compress_to(counted, share, len(prompt), compress)
            continuation = Continuation(model, resolved, tensors)
            results[method, share] = float(first_is_right and continues(continuation, answer))
    return results


def continues(continuation: Continuation, answer: list[int]) -> bool:
    """Whether each token after the answer's first is the likeliest."""
    return all(
        int(continuation.step(token).argmax()) == following for token, following in itertools.pairwise(answer)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100, help="of each task")
    parser.add_argument("--tokens", type=int, default=1024, help="prompt length")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model("demo", name="demo", device="cpu")
    generator = OneProcessGenerator(model)
    cells = []
    for task in TASK_NAMES:
        with torch.inference_mode():
            examples = [
                measure(model, generator, task, seed, arguments.tokens)
                for seed in tqdm(range(arguments.examples), desc=task, disable=None)
            ]
        for key in examples[0]:
            weighed_by, share = key
            exact = statistics.fmean(example[key] for example in examples)
            cells.append({"task": task, "weighed_by": weighed_by, "share": share, "exact": exact})
            sys.stdout.write(f"{task:14} {weighed_by:15} {share:6.1%}  exact {exact:6.1%}\n")
    if arguments.output:
        result = {
            "command": (
                f"python benchmarks/answer_queries.py --examples {arguments.examples} "
                f"--tokens {arguments.tokens}"
            ),
            "commit": commit(),
            "examples": arguments.examples,
            "torch": torch.__version__,
            "cells": cells,
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
