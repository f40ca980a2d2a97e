"""What a selection that follows a long answer could win: chosen anew from the full KV every so many tokens.

    python benchmarks/reselection.py --model FOLDER [--length 2048] [--budgets 5%,2.5%] [--every 0,16,32,64]
                                     [--methods snapkv,rocketkv,rdkv] [--examples 24] [--output FILE]

Questions with long answers about real documents (`benchmarks/real`). The full cache's greedy answer is fed,
and each contender is compared with the full cache by divergence, token by token. With 16 among `--every`
the prompt's rows are selected again before each 16th token, by the queries of the answer so far, as if
prefill had been sent them; the answer's own rows stay as they are. 0 selects once, as served.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from kvferry.shared.compression.interface import Ahead, LayerInputs
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.question import Question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.budgets import Target, parse_target
from kvferry.tools.evaluation.collection import read_collection
from kvferry.tools.evaluation.compressor import Compressor
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.conversation import tokenize
from kvferry.tools.evaluation.experiment import Contender, read_experiment
from kvferry.tools.evaluation.provenance import commit
from kvferry.tools.oracle import CapturedPrompt, Continuation, OneProcessGenerator

REAL = Path(__file__).parent / "real"
PLACES = (0, 16, 32, 64, 128, 300)
MAX_NEW_TOKENS = 300


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The full cache's answer to one prompt. `logprobs`: float32 `[n, V]`, before each token."""

    captured: CapturedPrompt
    tokens: list[int]
    logprobs: torch.Tensor


class Measured:
    """Divergences of one model's contenders."""

    def __init__(self, model: TransformersModel, config: EvalConfig) -> None:
        self._model = model
        self._generator = OneProcessGenerator(model)
        self._compressor = Compressor(model, self._generator, read_experiment(config))

    def answer(self, prompt: Sequence[int], question: Question | None = None) -> Answer:
        """Return the full cache's greedy answer."""
        captured = self._generator.capture(list(prompt), question=question)
        assert captured.logits is not None
        full = self._generator.compress(captured, plan=plan_for("full"), max_new_tokens=MAX_NEW_TOKENS)
        tokens = [int(captured.logits.argmax())]
        while tokens[-1] not in self._model.spec.eos_token_ids and len(tokens) < MAX_NEW_TOKENS:
            tokens.append(int(full.step(tokens[-1]).argmax()))
        return Answer(captured=captured, tokens=tokens, logprobs=self.fed(captured, tokens))

    def fed(self, captured: CapturedPrompt, tokens: Sequence[int]) -> torch.Tensor:
        """Return the full cache's log-probabilities `[n, V]` before each of these tokens."""
        assert captured.logits is not None
        full = self._generator.compress(captured, plan=plan_for("full"), max_new_tokens=MAX_NEW_TOKENS)
        rows = [captured.logits, *(full.step(token) for token in tokens[:-1])]
        return torch.stack(rows).log_softmax(-1)

    def divergences(self, answer: Answer, plan: CompressionPlan, target: Target, every: int) -> list[float]:
        """Return the KL from the full cache before each token of the answer but the first, in nats."""
        contender = Contender(method=plan.method, plan=plan, target=target)
        continuation = self._compress(answer.captured, contender)
        grown, found = answer.captured, []
        for step, token in enumerate(answer.tokens[:-1], 1):
            if every and step > 1 and (step - 1) % every == 0:
                so_far = [*answer.captured.token_ids, *answer.tokens[: step - 1]]
                grown = self._generator.capture(so_far, earlier=grown).joined(grown)
                continuation = self._again(answer, grown, contender, continuation)
            logprobs = continuation.step(token).log_softmax(-1)
            wanted = answer.logprobs[step]
            found.append(max(0.0, float((wanted.exp() * (wanted - logprobs)).sum())))
        return found

    def _compress(self, captured: CapturedPrompt, contender: Contender) -> Continuation:
        found = self._compressor.compress(captured, contender, max_new_tokens=MAX_NEW_TOKENS)
        assert found is not None, contender.budget
        return found

    def _again(
        self, answer: Answer, grown: CapturedPrompt, contender: Contender, before: Continuation
    ) -> Continuation:
        """Return a continuation with the prompt's rows that the answer's queries choose."""
        num_prompt = len(answer.captured.token_ids)
        takes_ahead = contender.plan.representation.name == "rdkv"

        def inputs_of(prompt: LayerInputs, later: LayerInputs) -> LayerInputs:
            queries = later.queries[:, :, num_prompt:]
            if not takes_ahead:
                return replace(prompt, queries=queries, question=None)
            keys, values = later.keys[:, num_prompt:], later.values[:, num_prompt:]
            return replace(prompt, ahead=Ahead(queries=queries, keys=keys, values=values))

        layers = tuple(map(inputs_of, answer.captured.layers, grown.layers))
        chosen = self._compress(replace(answer.captured, layers=layers, drafts={}), contender)
        return chosen.continuing(before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; write it with --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budgets", default="5%,2.5%")
    parser.add_argument("--every", default="0,16,32,64")
    parser.add_argument("--methods", default="snapkv,rocketkv,rdkv")
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    model = load_model(options.model, device="cpu", dtype=options.dtype)
    tokenizer = ChatTokenizer.load(options.model)
    found = read_collection(
        REAL, lengths=(options.length,), count_tokens=lambda text: len(tokenizer.encode(text))
    )
    examples = found["long", options.length]
    examples = examples[:: max(1, len(examples) // options.examples)][: options.examples]
    measured = Measured(model, EvalConfig(model=options.model))
    budgets = [parse_target(budget) for budget in options.budgets.split(",")]
    intervals = [int(every) for every in options.every.split(",")]
    cells: dict[tuple[str, str, int], list[list[float]]] = {}
    with torch.inference_mode():
        for example in tqdm(examples, disable=None):
            turn = tokenize(example, tokenizer).turns[-1]
            answer = measured.answer(turn.prompt_token_ids, turn.question)
            for method in options.methods.split(","):
                for target in budgets:
                    for every in intervals:
                        kl = measured.divergences(answer, plan_for(method), target, every)
                        cells.setdefault((method, target.label, every), []).append(kl)
    rows = [
        {"method": method, "budget": budget, "every": every, "kl": by_place(kl), "n": len(kl)}
        for (method, budget, every), kl in cells.items()
    ]
    lines = ["| method | bytes | every | " + " | ".join(f"from {place}" for place in PLACES[:-1]) + " |"]
    lines.append("|---|---|---|" + "---|" * (len(PLACES) - 1))
    for row in rows:
        texts = ["" if kl is None else f"{kl:.3f}" for kl in row["kl"]]
        lines.append(f"| {row['method']} | {row['budget']} | {row['every']} | " + " | ".join(texts) + " |")
    sys.stdout.write("\n".join(lines) + "\n")
    if options.output:
        result = {
            "command": "python benchmarks/reselection.py " + " ".join(arguments or sys.argv[1:]),
            "commit": commit(),
            "model": Path(options.model).name,
            "places": PLACES,
            "rows": rows,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def by_place(answers: Sequence[Sequence[float]]) -> list[float | None]:
    """Return the mean over all answers' tokens of each part; None where no answer is so long."""
    parts = [
        [kl for answer in answers for kl in answer[start:end]] for start, end in itertools.pairwise(PLACES)
    ]
    return [statistics.fmean(part) if part else None for part in parts]


if __name__ == "__main__":
    sys.exit(main())
