"""Long answers on the demo model: what decode stores at the end, and whether it still knows the prompt.

    python benchmarks/long_answers.py [--examples 40] [--tokens 4096] [--processes 2] [--output FILE]

A prompt is compressed to a tenth of its bytes. Then comes an answer as long as the prompt: filler, and at its
end the question about the document with its right answer, fed token by token through decode's own caches.
"exact" is how often every token of the right answer is the likeliest. With setting "aware" the prompt ends in
the question; with "agnostic" the document is compressed before there is one. "full" reads prompt and answer
in one pass. Bytes are counted at 16 bits a value; the shares are of the K and V of all tokens so far.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.formats.packed_layer import PackedCache
from kvferry.shared.compression.plan import REBUDGET_TOKENS, CompressionPlan, ParamValue
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.tools.evaluation.budgets import Target, plan_for_target
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator, compress_prompt
from kvferry.tools.recall import documents
from kvferry.tools.recall.tasks import TASKS, Example
from kvferry.tools.recall.vocabulary import ASSISTANT_ID, BOS_ID, END_ID, USER_ID, encode

TASK_NAMES = ("single_needle", "multi_key_8")
SEGMENT_TOKENS = 256
BUDGET = Target(label="10%", kind="retention", value=Fraction(1, 10))
AWARE = ("rocketkv", "snapkv", "rdkv")
AGNOSTIC = ("compactor-kivi",)
_GROUP = 5
"""Examples whose sequences take their steps in one batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method in a setting, with its generated tokens compacted or not."""

    method: str
    setting: str
    compacted: bool

    @property
    def plan(self) -> CompressionPlan:
        overrides: dict[str, ParamValue] = {REBUDGET_TOKENS: SEGMENT_TOKENS if self.compacted else 0}
        return plan_for(self.method, overrides=overrides)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example of a case.

    Attributes:
        exact: whether every token of the right answer was the likeliest.
        prompt, end: bytes in use before and after the long answer, as shares of the full KV's.
    """

    case: Case
    seed: int
    exact: bool
    prompt: float
    end: float


class Caches:
    """One sequence in decode's caches."""

    def __init__(
        self, model: LanguageModel, captured: CapturedPrompt, plan: CompressionPlan, num_new: int
    ) -> None:
        resolved = resolve_plan(
            plan,
            num_prompt_tokens=len(captured.token_ids),
            max_new_tokens=num_new,
            num_layers=model.spec.num_layers,
            head_dim=model.spec.head_dim,
        )
        resolved, tensors = compress_prompt(model.spec, resolved, captured.layers)
        layout = sequence_layout(make_formats(model.spec, resolved))
        self._buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
        self.layers: list[LayerCache] = [
            layer.place(self._buffer, its) for layer, its in zip(layout.layers, tensors, strict=True)
        ]
        sixteen_bits = make_formats(replace(model.spec, dtype="bfloat16"), resolved)
        self._formats = [(fmt, fmt.prompt_bytes(its)) for fmt, its in zip(sixteen_bits, tensors, strict=True)]
        self.position = len(captured.token_ids)
        self.num_appended = 0

    def size_bytes(self) -> int:
        """Bytes in use, at 16 bits a value."""
        packed = [
            segment.layout.size_bytes
            for layer in self.layers
            if isinstance(layer, PackedCache)
            for segment in layer.segments
        ]
        return sum(packed) + sum(
            fmt.used_bytes(self.num_appended, prompt_bytes) for fmt, prompt_bytes in self._formats
        )


def feed(model: LanguageModel, caches: Sequence[Caches], tokens: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Step all sequences through equally many tokens; yields float32 logits `[B, V]` after each."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        return torch.stack(
            [
                its.layers[layer].append_and_attend(
                    queries[i], keys[i], values[i], num_appended=its.num_appended, scaling=scaling
                )
                for i, its in enumerate(caches)
            ]
        )

    for column in zip(*tokens, strict=True):
        positions = torch.tensor([its.position for its in caches])
        yield model.decode(torch.tensor(column), positions, attention=attend)
        for its in caches:
            its.position += 1
            its.num_appended += 1


def long_answer(example: Example, num_tokens: int, seed: int) -> list[int]:
    """Filler, the question and its right answer: exactly `num_tokens` tokens."""
    question = encode(example.messages[-1]["content"].removeprefix(example.document))
    end = [END_ID, USER_ID, *question, END_ID, ASSISTANT_ID, *example.answer_token_ids]
    words = documents.fill(random.Random(f"long answer/{seed}"), num_tokens - len(end) + 13)
    return [*encode(" ".join(words))[: num_tokens - len(end)], *end]


def compressed(model: LanguageModel, captured: CapturedPrompt, case: Case, num_new: int) -> Caches:
    """A prompt in decode's caches, within the budget."""
    plan = plan_for_target(
        case.plan,
        BUDGET,
        match="kept",
        spec=replace(model.spec, dtype="bfloat16"),
        num_tokens=len(captured.token_ids),
        max_new_tokens=num_new,
    )
    assert plan is not None, f"{case.method} cannot be within {BUDGET.label} of the bytes"
    return Caches(model, captured, plan, num_new)


def measure(seeds: Sequence[int], size: int, cases: Sequence[Case]) -> list[Record]:
    """Every case's records of some examples, and those of "full" in the same settings."""
    torch.set_num_threads(1)  # the tensors of a step are small
    model = load_model("demo", name="demo", device="cpu", dtype="float32")
    with torch.inference_mode():
        return [
            record
            for setting in dict.fromkeys(case.setting for case in cases)
            for record in _measure(model, seeds, size, [its for its in cases if its.setting == setting])
        ]


def _measure(model: LanguageModel, seeds: Sequence[int], size: int, cases: Sequence[Case]) -> list[Record]:
    setting, generator, records = cases[0].setting, OneProcessGenerator(model), []
    running: list[tuple[Case, int, Caches, int]] = []
    answers: dict[int, list[int]] = {}
    rights: dict[int, list[int]] = {}
    for seed in seeds:
        example = TASKS[TASK_NAMES[seed % len(TASK_NAMES)]].example(num_tokens=size, seed=seed)
        answers[seed], rights[seed] = long_answer(example, size, seed), example.answer_token_ids
        prompt = example.prompt_token_ids
        if setting == "agnostic":
            prompt = [BOS_ID, USER_ID, *encode(example.document), END_ID, ASSISTANT_ID]
        captured = generator.capture(prompt)
        own = full_logits(model, captured, answers[seed][:-1], len(rights[seed]))
        full = Case(method="full", setting=setting, compacted=False)
        records.append(
            Record(case=full, seed=seed, exact=own.argmax(-1).tolist() == rights[seed], prompt=1.0, end=1.0)
        )
        for case in cases:
            caches = compressed(model, captured, case, size)
            running.append((case, seed, caches, caches.size_bytes()))
    fed = [answers[seed][:-1] for _, seed, _, _ in running]
    last = deque(
        feed(model, [caches for _, _, caches, _ in running], fed), maxlen=max(map(len, rights.values()))
    )
    likeliest = torch.stack([*last], 1).argmax(-1).tolist()
    token_bytes = replace(model.spec, dtype="bfloat16").kv_token_bytes
    for (case, seed, caches, prompt_bytes), tokens in zip(running, likeliest, strict=True):
        num_prompt = caches.position - caches.num_appended
        records.append(
            Record(
                case=case,
                seed=seed,
                exact=tokens[-len(rights[seed]) :] == rights[seed],
                prompt=prompt_bytes / (num_prompt * token_bytes),
                end=caches.size_bytes() / (caches.position * token_bytes),
            )
        )
    return records


class _After:
    """A prefill observer that gives the model an earlier pass's K and V, and keeps nothing."""

    def __init__(self, captured: CapturedPrompt) -> None:
        self._captured = captured

    def history(self, layer: int) -> tuple[Tensor, Tensor]:
        inputs = self._captured.layers[layer]
        return inputs.keys, inputs.values

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        pass


def full_logits(model: LanguageModel, captured: CapturedPrompt, answer: Sequence[int], count: int) -> Tensor:
    """The full model's logits after each of an answer's last tokens, `[count, V]`."""
    rows: list[Tensor] = []
    model.prefill(
        torch.tensor(answer),
        start=len(captured.token_ids),
        observer=_After(captured),
        on_logits=lambda _, its: rows.append(its),
    )
    return torch.cat(rows)[-count:]


def summary(records: Sequence[Record]) -> list[dict[str, object]]:
    """A row for each case: how often it was right, and the largest shares of bytes."""
    rows: list[dict[str, object]] = []
    for case in dict.fromkeys(record.case for record in records):
        its = [record for record in records if record.case == case]
        rows.append(
            {
                **asdict(case),
                "n": len(its),
                "exact": statistics.fmean(record.exact for record in its),
                "prompt_share": max(record.prompt for record in its),
                "end_share": max(record.end for record in its),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=40, help="of all tasks together")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt, and of the answer")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--methods", default="", help="only these, comma-separated")
    parser.add_argument(
        "--all-rows", action="store_true", help="also measure each method with every generated row"
    )
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.methods.split(",") if name] or [*AWARE, *AGNOSTIC]
    cases = [
        Case(method=method, setting=setting, compacted=compacted)
        for setting, methods in (("aware", AWARE), ("agnostic", AGNOSTIC))
        for method in methods
        if method in wanted
        for compacted in ((False, True) if arguments.all_rows else (True,))
    ]
    every = range(arguments.examples)
    records: list[Record] = []
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        groups = [every[first : first + _GROUP] for first in range(0, len(every), _GROUP)]
        for done in as_completed([pool.submit(measure, group, arguments.tokens, cases) for group in groups]):
            records += done.result()
            if arguments.output:
                write(arguments, records)
    for row in summary(records):
        sys.stdout.write(
            f"{row['method']:15} {row['setting']:9} {'compacted' if row['compacted'] else 'all rows':10} "
            f"n {row['n']}  exact {row['exact']:6.1%}  end {row['end_share']:6.2%}\n"
        )
    return 0


def write(arguments: argparse.Namespace, records: Sequence[Record]) -> None:
    """Write the result of the examples so far."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
    command = f"--examples {arguments.examples} --tokens {arguments.tokens}"
    result = {
        "command": f"python benchmarks/long_answers.py {command}",
        "commit": commit,
        "tasks": TASK_NAMES,
        "budget": BUDGET.label,
        "segment_tokens": SEGMENT_TOKENS,
        "rows": summary(records),
        "wrong": [
            {**asdict(record.case), "task": TASK_NAMES[record.seed % len(TASK_NAMES)], "seed": record.seed}
            for record in records
            if not record.exact
        ],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
