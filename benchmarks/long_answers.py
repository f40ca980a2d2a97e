"""Long answers on the demo model: what decode stores at the end, and whether it still knows the prompt.

    python benchmarks/long_answers.py [--examples 40] [--tokens 4096] [--processes 2] [--output FILE]

A prompt is compressed to a tenth of its bytes. Then comes an answer as long as the prompt: filler, and at its
end the question about the document with its right answer. "exact" is how often every token of the right
answer is the likeliest. With setting "aware" the prompt ends in the question; with "agnostic" the document is
compressed before there is one. "full" reads prompt and answer in one pass. Bytes are counted at 16 bits a
value; the shares are of the K and V of all tokens so far.

Methods with sparse attention and those with `rdkv`'s format are fed token by token through decode's own
caches. With dense attention a segment's tokens see the same rows, so they are run together, and the format
selects the rows that stay; a test compares the two.
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

from kvferry.kernels.kivi.rows import kivi_dequantise
from kvferry.kernels.packed.key_words import key_tiles
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.value_rows import unpack_value_rows
from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.compacting import CompactingCache, SelectedSegments
from kvferry.shared.compression.formats.interface import LayerCache, LayerFormat, Tensors
from kvferry.shared.compression.formats.kivi import Kivi
from kvferry.shared.compression.formats.packed import PackedCache
from kvferry.shared.compression.formats.rdkv import PackedSegments
from kvferry.shared.compression.formats.rows import Rows
from kvferry.shared.compression.formats.uniform import Uniform
from kvferry.shared.compression.interface import gather_rows
from kvferry.shared.compression.plan import REBUDGET_TOKENS, CompressionPlan, ParamValue
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.evaluation.budgets import Target, plan_for_target
from kvferry.tools.evaluation.distance import DistantModel
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator, compress_prompt
from kvferry.tools.recall import documents
from kvferry.tools.recall.tasks import TASKS, Example
from kvferry.tools.recall.vocabulary import ASSISTANT_ID, BOS_ID, END_ID, USER_ID, encode

TASK_NAMES = ("single_needle", "multi_key_8")
SEGMENT_TOKENS = 256
BUDGET = Target(label="10%", kind="retention", value=Fraction(1, 10))
AWARE = ("snapkv", "snapkv-kivi", "rocketkv", "rdkv")
AGNOSTIC = ("compactor", "compactor-kivi", "compactor-kivi:k_bits=8", "compactor-rdkv")
_STEPPED = ("rocketkv", "rdkv", "compactor-rdkv")
SIZED = (
    *("snapkv", "pyramidkv", "adakv", "rocketkv", "compactor", "compactor-hsa"),
    *("rocketkv-kivi", "snapkv-kivi", "compactor-kivi", "snapkv-think", "rdkv", "compactor-rdkv"),
)
"""Methods whose bytes are counted."""
_GROUP = 5
"""Examples whose sequences take their steps in one batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method, perhaps NAME:PARAMETER=INTEGER, in a setting, its generated tokens compacted or not."""

    method: str
    setting: str
    compacted: bool

    @property
    def plan(self) -> CompressionPlan:
        name, *changes = self.method.split(":")
        overrides: dict[str, ParamValue] = {REBUDGET_TOKENS: SEGMENT_TOKENS if self.compacted else 0}
        for change in changes:
            parameter, _, value = change.partition("=")
            overrides[parameter] = int(value)
        return plan_for(name, overrides=overrides)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example of a case.

    Attributes:
        exact: whether every token of the right answer was the likeliest.
        end: bytes in use at the answer's end, as a share of the full KV's.
    """

    case: Case
    seed: int
    exact: bool
    end: float


class Sequence16:
    """A compressed prompt with its size at 16 bits a value, and how far its answer has come."""

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
        resolved, self.tensors = compress_prompt(model.spec, resolved, captured.layers)
        self.formats = make_formats(model.spec, resolved)
        sixteen_bits = make_formats(replace(model.spec, dtype="bfloat16"), resolved)
        self._sizes = [
            (fmt, fmt.prompt_bytes(tensors)) for fmt, tensors in zip(sixteen_bits, self.tensors, strict=True)
        ]
        self.position = len(captured.token_ids)
        self.num_appended = 0

    def size_bytes(self) -> int:
        return sum(fmt.used_bytes(self.num_appended, prompt_bytes) for fmt, prompt_bytes in self._sizes)


class Caches(Sequence16):
    """One sequence in decode's caches."""

    def __init__(
        self, model: LanguageModel, captured: CapturedPrompt, plan: CompressionPlan, num_new: int
    ) -> None:
        super().__init__(model, captured, plan, num_new)
        layout = sequence_layout(self.formats)
        self._buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
        self.layers: list[LayerCache] = [
            layer.place(self._buffer, tensors)
            for layer, tensors in zip(layout.layers, self.tensors, strict=True)
        ]

    def size_bytes(self) -> int:
        packed = [
            segment.layout.size_bytes
            for layer in self.layers
            if isinstance(layer, CompactingCache) and isinstance(layer.inner, PackedCache)
            for segment in layer.inner.segments
        ]
        return super().size_bytes() + sum(packed)


class Blocks(Sequence16):
    """One sequence of a method with dense attention, run a segment at a time; a prefill observer."""

    def __init__(
        self, model: LanguageModel, captured: CapturedPrompt, plan: CompressionPlan, num_new: int
    ) -> None:
        super().__init__(model, captured, plan, num_new)
        self._rows = [
            prompt_rows(fmt, tensors) for fmt, tensors in zip(self.formats, self.tensors, strict=True)
        ]

    def history(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._rows[layer]

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        fmt = self.formats[layer]
        if self._is_followed and isinstance(fmt.segments, SelectedSegments):
            new = slice(keys.shape[1] - queries.shape[2], None)
            observed = queries[:, :, -fmt.segments.window :]
            index = fmt.segments.select(observed, keys[:, new], values[:, new], scaling=scaling)
            keys, values = (
                torch.cat([rows[:, : new.start], gather_rows(rows[:, new], index)], 1)
                for rows in (keys, values)
            )
        self._rows[layer] = keys.clone(), values.clone()

    def feed(self, model: DistantModel, tokens: Sequence[int]) -> Tensor:
        """The logits `[T, V]` after each of the tokens."""
        found: list[Tensor] = []
        for first in range(0, len(tokens), SEGMENT_TOKENS):
            block = tokens[first : first + SEGMENT_TOKENS]
            self._is_followed = first + len(block) < len(tokens)
            num_rows = self._rows[0][0].shape[1]
            model.skip_positions(0, self.position - num_rows)
            model.prefill(
                torch.tensor(block),
                start=num_rows,
                observer=self,
                on_logits=lambda _, logits: found.append(logits),
            )
            self.position += len(block)
            self.num_appended += len(block)
        model.skip_positions(0, 0)
        return torch.cat(found)


def prompt_rows(fmt: LayerFormat, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """K and V `[H_kv, n, D]` of a compressed prompt, dequantised."""
    if isinstance(fmt, Kivi):
        return kivi_dequantise(fmt.quantised(tensors))
    if isinstance(fmt, Uniform):
        return _unpacked(fmt.packed(tensors))
    assert isinstance(fmt, Rows), fmt.name
    return tensors["keys"], tensors["values"]


def _unpacked(packed: PackedLayer) -> tuple[Tensor, Tensor]:
    """K and V of heads that have as many tokens each, none of them at 16 bits."""
    keys, values = [], []
    for head in packed.heads:
        counts, size = head.counts, packed.layout.head_dim
        rows = torch.zeros(counts.num_tokens, size)
        for start, codes in key_tiles(head.key_words, counts.channels, counts.num_tokens, max_blocks=64):
            tokens = torch.arange(start, start + codes.shape[1])
            rows[tokens[:, None], head.channels.long()] = head.dequantise_keys(codes, tokens).T
        keys.append(rows)
        codes_by_width = zip((2, 4, 8), (head.values_2, head.values_4, head.values_8), strict=True)
        codes = torch.cat(
            [unpack_value_rows(packed_rows, width, size) for width, packed_rows in codes_by_width]
        )
        values.append(codes * head.value_scales[:, None] + head.value_minima[:, None])
    return torch.stack(keys), torch.stack(values)


def feed(model: LanguageModel, caches: Sequence[Caches], tokens: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Step all sequences through equally many tokens; yields float32 logits `[B, V]` after each."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        return torch.stack(
            [
                cache.layers[layer].append_and_attend(
                    queries[i], keys[i], values[i], num_appended=cache.num_appended, scaling=scaling
                )
                for i, cache in enumerate(caches)
            ]
        )

    for column in zip(*tokens, strict=True):
        positions = torch.tensor([cache.position for cache in caches])
        yield model.decode(torch.tensor(column), positions, attention=attend)
        for cache in caches:
            cache.position += 1
            cache.num_appended += 1


def long_answer(example: Example, num_tokens: int, seed: int) -> list[int]:
    """Filler, the question and its right answer: exactly `num_tokens` tokens."""
    question = encode(example.messages[-1]["content"].removeprefix(example.document))
    end = [END_ID, USER_ID, *question, END_ID, ASSISTANT_ID, *example.answer_token_ids]
    words = documents.fill(random.Random(f"long answer/{seed}"), num_tokens - len(end) + 13)
    return [*encode(" ".join(words))[: num_tokens - len(end)], *end]


def plan_of(spec: ModelSpec, case: Case, num_prompt: int, num_new: int) -> CompressionPlan:
    """A case's plan, within the budget."""
    plan = plan_for_target(
        case.plan,
        BUDGET,
        match="kept",
        spec=replace(spec, dtype="bfloat16"),
        num_tokens=num_prompt,
        max_new_tokens=num_new,
    )
    assert plan is not None, f"{case.method} cannot be within {BUDGET.label} of the bytes"
    return plan


def measure(seeds: Sequence[int], size: int, cases: Sequence[Case]) -> list[Record]:
    """Every case's records of some examples, and those of "full" in the same settings."""
    torch.set_num_threads(1)  # the tensors of a step are small
    model = DistantModel(load_model("demo", name="demo", device="cpu", dtype="float32"))
    with torch.inference_mode():
        return [
            record
            for setting in dict.fromkeys(case.setting for case in cases)
            for record in _measure(
                model, seeds, size, [candidate for candidate in cases if candidate.setting == setting]
            )
        ]


def _measure(model: DistantModel, seeds: Sequence[int], size: int, cases: Sequence[Case]) -> list[Record]:
    setting, generator, records = cases[0].setting, OneProcessGenerator(model), []
    stepped: list[tuple[Case, int, Caches]] = []
    answers: dict[int, list[int]] = {}
    rights: dict[int, list[int]] = {}

    def record(case: Case, seed: int, sequence: Sequence16, logits: Tensor) -> Record:
        token_bytes = replace(model.spec, dtype="bfloat16").kv_token_bytes
        return Record(
            case=case,
            seed=seed,
            exact=logits[-len(rights[seed]) :].argmax(-1).tolist() == rights[seed],
            end=sequence.size_bytes() / (sequence.position * token_bytes),
        )

    for seed in seeds:
        example = TASKS[TASK_NAMES[seed % len(TASK_NAMES)]].example(num_tokens=size, seed=seed)
        answers[seed], rights[seed] = long_answer(example, size, seed), example.answer_token_ids
        prompt = example.prompt_token_ids
        if setting == "agnostic":
            prompt = [BOS_ID, USER_ID, *encode(example.document), END_ID, ASSISTANT_ID]
        captured = generator.capture(prompt)
        own = full_logits(model, captured, answers[seed][:-1], len(rights[seed]))
        full = Case(method="full", setting=setting, compacted=False)
        exact = own.argmax(-1).tolist() == rights[seed]
        records.append(Record(case=full, seed=seed, exact=exact, end=1.0))
        for case in cases:
            plan = plan_of(model.spec, case, len(prompt), size)
            if case.method in _STEPPED:
                stepped.append((case, seed, Caches(model, captured, plan, size)))
            else:
                blocks = Blocks(model, captured, plan, size)
                logits = blocks.feed(model, answers[seed][:-1])
                records.append(record(case, seed, blocks, logits))
    if stepped:
        fed = [answers[seed][:-1] for _, seed, _ in stepped]
        longest = max(map(len, rights.values()))
        last = deque(feed(model, [caches for _, _, caches in stepped], fed), maxlen=longest)
        for (case, seed, caches), logits in zip(stepped, torch.stack([*last], 1), strict=True):
            records.append(record(case, seed, caches, logits))
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
        on_logits=lambda _, logits: rows.append(logits),
    )
    return torch.cat(rows)[-count:]


def end_shares(spec: ModelSpec, size: int) -> list[dict[str, object]]:
    """Bytes at the end as shares of the full KV's, of every method that compacts, computed without a run.

    Where bytes depend on the content, the most that they may come to.
    """
    sixteen_bits, rows = replace(spec, dtype="bfloat16"), []
    for method in SIZED:
        shares: dict[str, float] = {}
        for name, compacted in (("compacted", True), ("all_rows", False)):
            plan = plan_of(spec, Case(method=method, setting="aware", compacted=compacted), size, size)
            resolved = resolve_plan(
                plan,
                num_prompt_tokens=size,
                max_new_tokens=size,
                num_layers=spec.num_layers,
                head_dim=spec.head_dim,
            )
            used = 0
            for fmt in make_formats(sixteen_bits, resolved):
                used += fmt.used_bytes(size - 1)
                if isinstance(fmt.segments, PackedSegments):
                    used += fmt.segments.max_segments * fmt.segments.limit_bytes
            shares[name] = used / ((2 * size - 1) * sixteen_bits.kv_token_bytes)
        rows.append({"method": method, **shares})
    return rows


def summary(records: Sequence[Record]) -> list[dict[str, object]]:
    """A row for each case: how often it was right, and the largest share of bytes."""
    rows: list[dict[str, object]] = []
    for case in dict.fromkeys(record.case for record in records):
        of_case = [record for record in records if record.case == case]
        rows.append(
            {
                **asdict(case),
                "n": len(of_case),
                "exact": statistics.fmean(record.exact for record in of_case),
                "end_share": max(record.end for record in of_case),
            }
        )
    return rows


def measured(
    groups: Sequence[Sequence[int]], size: int, cases: Sequence[Case], *, num_processes: int
) -> Iterator[list[Record]]:
    """The records of each group when it is done."""
    if num_processes == 1:
        yield from (measure(group, size, cases) for group in groups)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(measure, group, size, cases) for group in groups]):
            yield done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=40, help="of all tasks together; 0 counts bytes only")
    parser.add_argument("--seeds", default="", help="of the examples, comma-separated; else the first ones")
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
        for compacted in ((True, False) if arguments.all_rows else (True,))
    ]
    sizes = end_shares(load_model("demo", name="demo", device="cpu").spec, arguments.tokens)
    for row in sizes:
        sys.stdout.write(
            f"{row['method']:15} end {row['compacted']:6.2%}  with all rows {row['all_rows']:6.2%}\n"
        )
    every = [int(seed) for seed in arguments.seeds.split(",") if seed] or range(arguments.examples)
    records: list[Record] = []
    if arguments.output:
        write(arguments, sizes, records)
    groups = [every[first : first + _GROUP] for first in range(0, len(every), _GROUP)]
    for found in measured(groups, arguments.tokens, cases, num_processes=arguments.processes):
        records += found
        if arguments.output:
            write(arguments, sizes, records)
    for row in summary(records):
        sys.stdout.write(
            f"{row['method']:15} {row['setting']:9} {'compacted' if row['compacted'] else 'all rows':10} "
            f"n {row['n']}  exact {row['exact']:6.1%}  end {row['end_share']:6.2%}\n"
        )
    return 0


def write(
    arguments: argparse.Namespace, sizes: Sequence[dict[str, object]], records: Sequence[Record]
) -> None:
    """Write the result of the examples so far."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
    command = f"--examples {arguments.examples} --tokens {arguments.tokens}"
    command += f" --methods {arguments.methods}" * bool(arguments.methods)
    command += f" --seeds {arguments.seeds}" * bool(arguments.seeds)
    command += " --all-rows" * arguments.all_rows
    result = {
        "command": f"python benchmarks/long_answers.py {command}",
        "commit": commit,
        "tasks": TASK_NAMES,
        "budget": BUDGET.label,
        "segment_tokens": SEGMENT_TOKENS,
        "sizes": sizes,
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
