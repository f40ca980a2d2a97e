"""What storing history in 16, 8 or 4 bits costs: bytes, and the next turn's answers on the demo model.

    python benchmarks/history_precision.py [--tokens 1024] [--examples 40] [--output FILE]

The history is a document of the recall tasks as the model computed it, rounded as the store rounds it; the
new turn asks about it, attending to everything. Printed per precision: bytes a token, the negative
log-likelihood of the right answer per token, how many answers are right in whole (teacher-forced), and how
often the likeliest token is the one that exact history gives.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from kvferry.shared.history.rows import RowChunk, RowPrecision
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.process.config import HistoryBits
from kvferry.tools.recall.tasks import TASKS

TASK = "multi_key_8"


class _Pass:
    """Gives a pass its history, and keeps K and V of what it runs."""

    def __init__(self, history: list[RowChunk]) -> None:
        self._history = history
        self.kv: list[tuple[Tensor, Tensor]] = []

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self._history[layer].rows() if self._history else None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.kv.append((keys.clone(), values.clone()))


def _answer_logits(
    model: LanguageModel, history: list[RowChunk], start: int, ids: list[int], n: int
) -> Tensor:
    """Logits `[n, V]` for the last n tokens of `ids`, each after the right tokens before it."""
    logits = []
    for end in range(len(ids) - n, len(ids)):
        tokens = torch.tensor(ids[start:end])
        logits.append(model.prefill(tokens, start=start, observer=_Pass(history)))
    return torch.stack(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="history before the question")
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    model = load_model("demo", name="demo", device="cpu", dtype="float32", max_model_len=0)
    sums = {bits: [0.0, 0, 0, 0, 0] for bits in get_args(HistoryBits)}
    with torch.inference_mode():
        for seed in range(options.examples):
            example = TASKS[TASK].example(num_tokens=options.tokens, seed=seed)
            ids = example.prompt_token_ids + example.answer_token_ids
            num_answer = len(example.answer_token_ids)
            start = len(example.prompt_token_ids) - 16
            document = _Pass([])
            model.prefill(torch.tensor(ids[:start]), start=0, observer=document)
            wanted = torch.tensor(example.answer_token_ids)
            exact: Tensor | None = None
            for bits, total in sums.items():
                precision = RowPrecision(bits=bits, dtype=torch.float32)
                history = [precision.encode(keys, values) for keys, values in document.kv]
                logits = _answer_logits(model, history, start, ids, num_answer)
                likeliest = logits.argmax(-1)
                exact = likeliest if exact is None else exact
                log_probabilities = logits.log_softmax(-1)[torch.arange(num_answer), wanted]
                total[0] -= float(log_probabilities.sum())
                total[1] += num_answer
                total[2] += int(torch.equal(likeliest, wanted))
                total[3] += int((likeliest == exact).sum())
                total[4] += sum(chunk.size_bytes for chunk in history) / start
    results = {
        bits: {
            "bytes_per_token": size / options.examples,
            "nll_per_token": nll / num_tokens,
            "answers_right": right,
            "agreement": agreed / num_tokens,
        }
        for bits, (nll, num_tokens, right, agreed, size) in sums.items()
    }
    for bits, row in results.items():
        sys.stdout.write(
            f"{bits}: {row['bytes_per_token']:.0f} bytes a token, NLL {row['nll_per_token']:.4f}, "
            f"{row['answers_right']} of {options.examples} answers right, agreement {row['agreement']:.4f}\n"
        )
    if options.output:
        figures = {
            "command": sys.argv, "task": TASK, "tokens": options.tokens, "examples": options.examples,
            "results": results,
        }  # fmt: skip
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
