"""Accuracy of a demo model: exact match of the whole answer, per task and length, with the full KV cache.

Answers are teacher-forced: greedy decoding gives the whole answer exactly when every answer token, the end
token among them, is the most likely one after the right prefix. So one forward pass a batch decides, and no
decoding loop is needed. Compression is not looked at here; `kvferry eval` does that with the same tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.shared.errors import ConfigurationError, KvferryError
from kvferry.tools.recall.denormals import flushed_denormals
from kvferry.tools.recall.network import RecallNetwork
from kvferry.tools.recall.tasks import TASKS, Example, Task
from kvferry.tools.recall.trainer import load_network
from kvferry.tools.recall.vocabulary import PAD_ID

_log = structlog.get_logger(__name__)

_BATCH_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One task at one length.

    Attributes:
        accuracy: part of the answers that match entirely.
        half_width: of the 95 % Wilson interval.
    """

    task: str
    num_tokens: int
    held_out: bool
    num_examples: int
    num_correct: int

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_examples

    @property
    def half_width(self) -> float:
        n, p, z = self.num_examples, self.accuracy, 1.96
        return z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))


@torch.no_grad()
def num_correct(
    network: RecallNetwork, examples: Sequence[Example], *, dtype: torch.dtype, gap: int = 0
) -> int:
    """How many examples of about the same length the network answers exactly; one forward pass.

    Args:
        gap: positions skipped before the last question: the document is that much further away, not longer.
    """
    device = next(network.parameters()).device
    prompts = [e.prompt_token_ids for e in examples]
    answers = [e.answer_token_ids for e in examples]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True)) - 1
    longest = max(map(len, answers))
    token_ids = torch.full((len(examples), width), PAD_ID)
    positions = torch.zeros((len(examples), longest), dtype=torch.long)
    wanted = torch.full((len(examples), longest), -1)
    position_ids = torch.arange(width).repeat(len(examples), 1)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = [*prompt, *answer[:-1]]
        token_ids[i, : len(text)] = torch.tensor(text)
        positions[i, : len(answer)] = torch.arange(len(prompt) - 1, len(text))
        wanted[i, : len(answer)] = torch.tensor(answer)
        position_ids[i, len(prompt) - _num_question_tokens(examples[i]) :] += gap
    with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
        hidden = network.hidden(
            token_ids.to(device), positions.to(device), position_ids=position_ids.to(device)
        )
        predicted: Tensor = F.linear(hidden, network.embed_tokens.weight).argmax(-1).cpu()
    return int(((predicted == wanted) | (wanted < 0)).all(1).sum())


def _num_question_tokens(example: Example) -> int:
    """Of the prompt's tokens those of the last question, its end and the assistant's beginning."""
    last = example.messages[-1]["content"]
    if len(example.messages) == 1:
        last = last.removeprefix(example.document)
    return len(last.split()) + 2


def evaluate_cell(
    network: RecallNetwork,
    task: Task,
    *,
    num_tokens: int,
    num_examples: int,
    held_out: bool = False,
    dtype: torch.dtype = torch.float32,
    gap: int = 0,
    first_seed: int = 0,
) -> Cell:
    """Accuracy on the task's examples of `num_examples` seeds. Args: gap: as of `num_correct`."""
    rows = max(1, _BATCH_TOKENS // num_tokens)
    correct = 0
    end = first_seed + num_examples
    for start in range(first_seed, end, rows):
        seeds = range(start, min(start + rows, end))
        batch = [task.example(num_tokens=num_tokens, seed=s, held_out=held_out) for s in seeds]
        correct += num_correct(network, batch, dtype=dtype, gap=gap)
    return Cell(
        task=task.name,
        num_tokens=num_tokens,
        held_out=held_out,
        num_examples=num_examples,
        num_correct=correct,
    )


def markdown_table(cells: Iterable[Cell]) -> str:
    """Tasks down, lengths across, accuracy in % with the half width of its 95 % interval."""
    by_key = {(c.task, c.num_tokens): c for c in cells}
    lengths = sorted({t for _, t in by_key})
    lines = [
        "| task | " + " | ".join(map(str, lengths)) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for task in TASKS.values():
        row = [by_key.get((task.name, t)) for t in lengths]
        if any(row):
            texts = [f"{100 * c.accuracy:.1f} ±{100 * c.half_width:.1f}" if c else "" for c in row]
            lines.append(f"| {task.description} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="exported folder or checkpoint.pt")
    parser.add_argument(
        "--tasks", default="all", help=f"comma-separated; of {', '.join(TASKS)} (default: all)"
    )
    parser.add_argument(
        "--cells",
        default="512:200,1024:200,2048:200",
        help="length:examples, comma-separated (default: 512:200,1024:200,2048:200)",
    )
    parser.add_argument("--held-out", action="store_true", help="held-out entities and wordings")
    parser.add_argument(
        "--gap", type=int, default=0, help="positions skipped between document and question (default: 0)"
    )
    parser.add_argument(
        "--first-seed",
        type=int,
        default=0,
        help="of the examples (default: 0, as in the card's tables; choose between models on others)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON result; the table goes beside it as .md"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate and write the result after every cell, so that a stopped run keeps what it has."""
    if args.threads:
        torch.set_num_threads(args.threads)
    names = list(TASKS) if args.tasks == "all" else args.tasks.split(",")
    for name in ("gap", "first_seed"):
        if getattr(args, name) < 0:
            option = "--" + name.replace("_", "-")
            raise ConfigurationError(f"{option} is {getattr(args, name)}; it must be 0 or more")
    unknown = [n for n in names if n not in TASKS]
    if unknown:
        raise ConfigurationError(f"--tasks has {unknown}; allowed are {list(TASKS)}")
    network = load_network(args.model)
    network.to(args.device)
    cells: list[Cell] = []
    for num_tokens, num_examples in _parse_cells(args.cells):
        for name in names:
            started_s = time.monotonic()
            with flushed_denormals():
                cell = evaluate_cell(
                    network,
                    TASKS[name],
                    num_tokens=num_tokens,
                    num_examples=num_examples,
                    held_out=args.held_out,
                    dtype=getattr(torch, args.dtype),
                    gap=args.gap,
                    first_seed=args.first_seed,
                )
            cells.append(cell)
            _log.info(
                "cell",
                task=name,
                num_tokens=num_tokens,
                accuracy=round(cell.accuracy, 4),
                num_examples=num_examples,
                seconds=round(time.monotonic() - started_s, 1),
            )
            unusual = {"gap": args.gap, "first_seed": args.first_seed}
            write_result(args.out, cells, model=args.model.name, dtype=args.dtype, **unusual)
    return 0


def write_result(path: Path, cells: Sequence[Cell], *, model: str, dtype: str, **unusual: int) -> None:
    """Write the cells as JSON and, beside it, as a Markdown table. Args: unusual: written where not 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "measure": "exact match of the whole answer, greedy, full KV, teacher-forced",
        "model": model,
        "dtype": dtype,
        **{name: value for name, value in unusual.items() if value},
        "cells": [{**asdict(c), "accuracy": c.accuracy, "half_width": c.half_width} for c in cells],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown_table(cells), encoding="utf-8")


def _parse_cells(text: str) -> list[tuple[int, int]]:
    try:
        cells = [(int(a), int(b)) for a, b in (part.split(":") for part in text.split(","))]
    except ValueError as error:
        raise ConfigurationError(f"--cells is {text!r}; it takes e.g. 512:200,1024:100") from error
    if any(n < 1 for _, n in cells):
        raise ConfigurationError(f"--cells is {text!r}; a cell needs at least one example")
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; errors on purpose end it with one line and code 2."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.tools.recall.evaluate", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except KvferryError as error:
        _log.error("evaluation failed", error=error.message)
        return 2


if __name__ == "__main__":
    sys.exit(main())
