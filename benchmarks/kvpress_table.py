"""kvferry beside kvpress at equal bytes, question by question: tables, plots and a JSON file.

    python benchmarks/kvpress_table.py --prompts FILE --kvpress FILE --records RECORDS.jsonl --output FOLDER

`kvpress_prompts.py` wrote the first file, `kvpress_peer.py` the second, `kvferry eval` the third (with
`--kv-dtype bfloat16`). A press that drops 0.95 stands beside methods at 5 %. In each cell (setting, length,
budget) the best press is the one with the least KL, and every contender's KL is taken over that press's,
question by question: the geometric mean of these ratios, with its 95 % interval. Only questions count that
all of a cell's contenders were measured on.

    FOLDER/results.json, results.md, kl-SETTING-LENGTH.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from kvpress_prompts import full_records, read_records

from kvferry.shared.model.spec import DTYPE_BYTES
from kvferry.tools.evaluation.answer_scores import Reference
from kvferry.tools.evaluation.conversation import contains, same_text
from kvferry.tools.evaluation.experiment import FULL, Setting, describe_length, describe_task
from kvferry.tools.evaluation.losses import ALL_TASKS, PLACES, Loss, losses_markdown, paired_loss
from kvferry.tools.evaluation.plots import style
from kvferry.tools.evaluation.provenance import commit
from kvferry.tools.evaluation.records import Record, TurnScore

PEER = "kvpress "
"""Begins the names of presses."""
STARTS = PLACES[:2]
"""KL is taken over whole answers, and without the first tokens, which a draft may have generated."""
FLOOR = 1e-4
"""Nats that are added to every KL: below them it is rounding."""
TARGET = 1 / 3
_DPI = 120
_Z = 1.96

Cell = tuple[Setting, int, str]
"""Setting, length and budget."""
Measured = dict[str, dict[str, Record]]
"""By contender, then by example."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A contender's KL over that of the best press, over the questions of a task.

    Attributes:
        start: the first of the answers' tokens that count.
        num_examples: questions with an answer that long, two at least.
        kl: geometric mean over questions of nats a token.
        best: the press with the least.
        ratio: geometric mean over questions; lowest, highest: its 95 % interval.
        kept_share: bytes as a share of the full KV's.
    """

    setting: Setting
    num_tokens: int
    budget: str
    task: str
    method: str
    start: int
    num_examples: int
    kl: float
    best: str
    ratio: float
    lowest: float
    highest: float
    kept_share: float


def budget_of(ratio: float) -> str:
    """Return the budget of a press that drops this share, as `kvferry eval` writes it."""
    return f"{100 * (1 - ratio):g}%"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def reference_of(prompt: Mapping[str, Any]) -> Reference:
    given = prompt["reference"]
    return Reference(**{**given, "texts": tuple(given["texts"]), "classes": tuple(given["classes"])})


def as_record(line: Mapping[str, Any], full: Record, reference: Reference) -> Record:
    """Return a press's line as a record. Args: full: the full cache's of the same question."""
    text, right = line["text"], reference.right
    turn = TurnScore(
        exact=any(same_text(text, each) for each in right),
        contained=any(contains(text, each) for each in right),
        nll=math.nan,
        agreement=line["agreement"],
        text=text,
        scores={reference.score: reference(text)},
        num_same=line["num_same"],
        kl=tuple(line["kl"]),
    )
    key = replace(
        full.key,
        setting=line["setting"],
        method=PEER + line["press"],
        digest="",
        budget=budget_of(line["ratio"]),
        match="kept",
    )
    sizes = {name: line[name] for name in ("num_compressed_tokens", "kept_bytes", "full_bytes")}
    return Record(key=key, turns=(turn,), **sizes)


def by_cell(records: Iterable[Record], examples: Iterable[str]) -> dict[Cell, Measured]:
    """Return what contenders were measured on, as far as a cell has both kinds and common questions."""
    known = set(examples)
    cells: dict[Cell, Measured] = {}
    for record in records:
        key = record.key
        if key.method != FULL and key.match == "kept" and record.turns and key.example in known:
            measured = cells.setdefault((key.setting, key.num_tokens, key.budget), {})
            measured.setdefault(key.method, {})[key.example] = record
    found = {}
    for cell, measured in sorted(cells.items(), key=lambda item: (*item[0][:2], -share(item[0][2]))):
        common = set.intersection(*(set(by_example) for by_example in measured.values()))
        if common and len({method.startswith(PEER) for method in measured}) == 2:
            found[cell] = {
                method: {example: by_example[example] for example in sorted(common)}
                for method, by_example in sorted(measured.items(), key=lambda item: item[0].startswith(PEER))
            }
    return found


def share(budget: str) -> float:
    """Return a budget as a number, 0 to 100; tokens and bytes have none."""
    return float(budget[:-1]) if budget.endswith("%") else 0.0


def losses_of(cells: Mapping[Cell, Measured], full: Mapping[str, Record]) -> list[Loss]:
    """Return the loss of each contender in each cell, over all tasks and by task."""
    return [
        paired_loss(
            [(full[name], record) for name, record in by_example.items()],
            setting,
            length,
            task,
            method,
            budget,
        )
        for (setting, length, budget), measured in cells.items()
        for task, of_task in by_task(measured)
        for method, by_example in of_task.items()
    ]


def by_task(measured: Measured) -> Iterator[tuple[str, Measured]]:
    """Yield all questions, then those of each task."""
    yield ALL_TASKS, measured
    for task in dict.fromkeys(entry.key.task for entry in next(iter(measured.values())).values()):
        yield (
            task,
            {
                method: {name: record for name, record in by_example.items() if record.key.task == task}
                for method, by_example in measured.items()
            },
        )


def ratios_of(cells: Mapping[Cell, Measured]) -> list[Ratio]:
    """Return every contender's KL over the best press's, over all tasks and by task."""
    return [
        ratio
        for cell, measured in cells.items()
        for task, of_task in by_task(measured)
        for start in STARTS
        for ratio in _ratios(cell, task, of_task, start)
    ]


def _ratios(cell: Cell, task: str, measured: Measured, start: int) -> Iterator[Ratio]:
    lengths = [[len(entry.turns[-1].kl) for entry in of_method.values()] for of_method in measured.values()]
    if any(other != lengths[0] for other in lengths):
        raise SystemExit(f"contenders of {cell} were compared along other answers of the full cache")
    levels = {
        method: [
            math.log(fmean(kl) + FLOOR)
            for record in by_example.values()
            if (kl := record.turns[-1].kl[start:])
        ]
        for method, by_example in measured.items()
    }
    if len(next(iter(levels.values()))) < 2:
        return
    best = min(
        (method for method in levels if method.startswith(PEER)), key=lambda press: fmean(levels[press])
    )
    setting, num_tokens, budget = cell
    for method, level in levels.items():
        differences = [mine - theirs for mine, theirs in zip(level, levels[best], strict=True)]
        mean, number = fmean(differences), len(differences)
        half = _Z * stdev(differences) / math.sqrt(number)
        yield Ratio(
            setting=setting,
            num_tokens=num_tokens,
            budget=budget,
            task=task,
            method=method,
            start=start,
            num_examples=number,
            kl=max(0.0, math.exp(fmean(level)) - FLOOR),
            best=best,
            ratio=math.exp(mean),
            lowest=math.exp(mean - half),
            highest=math.exp(mean + half),
            kept_share=fmean(entry.kept_bytes / entry.full_bytes for entry in measured[method].values()),
        )


def verdicts(ratios: Sequence[Ratio]) -> Iterator[str]:
    """Yield a line for each method of ours: in how many cells it comes to at most the target."""
    for method in dict.fromkeys(entry.method for entry in ratios if not entry.method.startswith(PEER)):
        for setting in dict.fromkeys(entry.setting for entry in ratios):
            found = [
                entry.ratio
                for entry in ratios
                if (entry.method, entry.setting, entry.task, entry.start) == (method, setting, ALL_TASKS, 0)
            ]
            if found:
                good = sum(ratio <= TARGET for ratio in found)
                yield (
                    f"- `{method}`, {setting}: at most a third of the best press's KL in {good} of "
                    f"{len(found)} cells of length and budget, at most {max(found):.2g} of it in all"
                )


def ratio_tables(ratios: Sequence[Ratio]) -> Iterator[str]:
    """Yield tables for each setting and length: KL by budget, then our ratios by task."""
    for setting, length in dict.fromkeys((ratio.setting, ratio.num_tokens) for ratio in ratios):
        of_both = [ratio for ratio in ratios if (ratio.setting, ratio.num_tokens) == (setting, length)]
        budgets = list(dict.fromkeys(ratio.budget for ratio in of_both))
        for start in dict.fromkeys(ratio.start for ratio in of_both):
            chosen = {
                (ratio.method, ratio.budget): ratio
                for ratio in of_both
                if (ratio.task, ratio.start) == (ALL_TASKS, start)
            }
            tokens = f"from token {start} on" if start else "of all tokens"
            yield f"## {describe_length(length)}, {setting}: KL {tokens}, and its share of the best press's"
            lines = [f"| method | {' | '.join(budgets)} |", "|---|" + "---|" * len(budgets)]
            for method in dict.fromkeys(method for method, _ in chosen):
                texts = [_kl(chosen.get((method, budget))) for budget in budgets]
                lines.append(f"| `{method}` | {' | '.join(texts)} |")
            counts = sorted({ratio.num_examples for ratio in chosen.values()})
            yield "\n".join(
                [*lines, "", f"n = {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}."]
            )
        yield f"## {describe_length(length)}, {setting}: share of the best press's KL by task"
        tasks = [task for task in dict.fromkeys(ratio.task for ratio in of_both) if task != ALL_TASKS]
        lines = [f"| method | budget | {' | '.join(map(describe_task, tasks))} |"]
        lines.append("|---|---|" + "---|" * len(tasks))
        whole = {(ratio.method, ratio.budget, ratio.task): ratio for ratio in of_both if ratio.start == 0}
        for method, budget in dict.fromkeys((ratio.method, ratio.budget) for ratio in of_both):
            if not method.startswith(PEER):
                row = [whole.get((method, budget, task)) for task in tasks]
                texts = [
                    "" if ratio is None else f"{ratio.ratio:.2g} (n = {ratio.num_examples})" for ratio in row
                ]
                lines.append(f"| `{method}` | {budget} | {' | '.join(texts)} |")
        yield "\n".join(lines)


def _kl(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    text = f"{ratio.kl:.2g}"
    return (
        text
        if ratio.method == ratio.best
        else f"{text}, {ratio.ratio:.2g} ({ratio.lowest:.2g} to {ratio.highest:.2g})"
    )


def draw(ratios: Sequence[Ratio], folder: Path) -> list[Path]:
    """Draw KL over bytes kept for each setting and length; presses are dashed."""
    from matplotlib.figure import Figure

    written = []
    chosen = [ratio for ratio in ratios if (ratio.task, ratio.start) == (ALL_TASKS, 0)]
    for setting, length in dict.fromkeys((ratio.setting, ratio.num_tokens) for ratio in chosen):
        figure = Figure(figsize=(8.6, 4.6), layout="constrained")
        axes = figure.subplots()
        of_both = [ratio for ratio in chosen if (ratio.setting, ratio.num_tokens) == (setting, length)]
        for method in dict.fromkeys(ratio.method for ratio in of_both):
            points = sorted(
                (100 * ratio.kept_share, ratio.kl + FLOOR) for ratio in of_both if ratio.method == method
            )
            colour, marker = style(method)
            line = "--" if method.startswith(PEER) else "-"
            axes.plot(*zip(*points, strict=True), line, color=colour, marker=marker, label=method)
        axes.set(
            title=f"{describe_length(length)}, {setting}",
            xlabel="bytes retained, % of the full KV",
            ylabel="KL, nats a token (geometric mean)",
            xscale="log",
            yscale="log",
        )
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(visible=True, alpha=0.3)
        figure.legend(loc="outside right upper", fontsize="small")
        written.append(folder / f"kl-{setting}-{length}.png")
        figure.savefig(written[-1], dpi=_DPI)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="file of kvpress_prompts.py")
    parser.add_argument("--kvpress", type=Path, required=True, help="file of kvpress_peer.py")
    parser.add_argument("--records", type=Path, nargs="+", required=True, help="files of kvferry eval")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    options = parser.parse_args(arguments)
    ours = read_records(options.records)
    full = full_records(ours)
    fingerprint = next(iter(full.values())).key.fingerprint
    mine = [record for record in ours.values() if record.key.fingerprint == fingerprint]
    if wide := {record.key.kv_dtype for record in mine if DTYPE_BYTES[record.key.kv_dtype] != 2}:
        raise SystemExit(
            f"the records count K and V rows as {', '.join(wide)}; measure with --kv-dtype bfloat16"
        )
    prompts = {line["example"]: line for line in read_lines(options.prompts) if line["example"] in full}
    lines = read_lines(options.kvpress)
    about = [line["about"] for line in lines if "about" in line]
    of_presses = [line for line in lines if line.get("example") in prompts]
    same = [
        line["num_same"] == len(prompts[line["example"]]["answer"])
        for line in of_presses
        if line["press"] == FULL
    ]
    theirs = [
        as_record(line, full[line["example"]], reference_of(prompts[line["example"]]))
        for line in of_presses
        if line["press"] != FULL
    ]
    cells = by_cell([*mine, *theirs], prompts)
    if not cells:
        raise SystemExit("no budget has both a press and a method that were measured on one question")
    losses, ratios = losses_of(cells, full), ratios_of(cells)
    commits = ", ".join(sorted({record.commit for record in mine}))
    versions = ", ".join(f"{name} {about[-1][name]}" for name in ("kvpress", "transformers", "torch"))
    command = "benchmarks/kvpress_table.py " + " ".join(arguments or sys.argv[1:])
    notes = [
        f"# kvferry beside kvpress: {about[-1]['model']}",
        f"`{command}`",
        f"{versions}, in {about[-1]['dtype']}; kvferry of commit {commits}. The prompts are the same, token "
        "for token, and K and V rows count 16 bits a value. In kvpress's environment the full cache's greedy "
        f"answer is kvferry's, token for token, to {sum(same)} of {len(same)} questions.",
        f"KL: nats a token of the full KV's answer, geometric mean over questions after adding {FLOOR:g}. "
        "Behind it, as a share of the best press's in the same column: geometric mean over questions and its "
        "95 % interval.",
        "\n".join(verdicts(ratios)),
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    result = {
        "command": command,
        "commit": commit(),
        "commits": commits.split(", "),
        "kvpress": about,
        "same_full_answers": [sum(same), len(same)],
        "floor": FLOOR,
        "ratios": [asdict(ratio) for ratio in ratios],
        "losses": [asdict(loss) for loss in losses],
    }
    paths = [options.output / "results.json", options.output / "results.md"]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    overall = [loss for loss in losses if loss.task == ALL_TASKS]
    sections = [*notes, *ratio_tables(ratios), *losses_markdown(overall)]
    paths[1].write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    for path in [*paths, *draw(ratios, options.output)]:
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
