"""Markdown tables of an evaluation: one for each setting and length, needle grids of depth by length, and
the full cache's accuracy by task and length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from kvferry.tools.evaluation.experiment import FULL, describe_length, describe_task
from kvferry.tools.evaluation.summary import Cell, Scores
from kvferry.tools.recall.tasks import TASKS

_LEGEND = (
    "Accuracy in % (exact match of the whole greedy answer, ± half the width of its 95 % interval). Kept: "
    "retained bytes of rows, page extremes and positions; read: bytes that one decode step reads; both as a "
    "share of the full KV's. NLL: nats per token of the right answer; agreement: the full cache's greedy "
    "answer tokens that stay the likeliest, in %; both over all tasks of the row."
)
_SETTINGS = {
    "aware": "every turn's selection sees its question",
    "once": "the first turn's selection serves all turns",
    "agnostic": "the document is compressed before any question",
}
_NAMED_LEGEND = (
    "{names}: in %, the mean over all questions, from the format of the data (the definitions are those of "
    "`tools/evaluation/answer_scores.py`, the questions' wording is our own)."
)
_DIFFERENCES_LEGEND = (
    "First differences: of the row's answers, the share in % whose first token that is not the full KV's is "
    "this one."
)
NOT_MET = "n/a"


def markdown(cells: Sequence[Cell], *, title: str, notes: Sequence[str]) -> str:
    """Write all tables of a result, with a title and what was run."""
    parts = [f"# {title}", *notes, _LEGEND]
    for setting, meaning in _SETTINGS.items():
        chosen = [cell for cell in cells if cell.setting == setting]
        for num_tokens in sorted({cell.num_tokens for cell in chosen}):
            scattered = [c for c in chosen if c.num_tokens == num_tokens and c.depth is None]
            if scattered:
                parts.append(f"## {describe_length(num_tokens)}, {setting}: {meaning}")
                parts.append("\n".join(_comparison(scattered)))
                if differences := list(_differences(scattered)):
                    parts.append("\n".join((_DIFFERENCES_LEGEND, "", *differences)))
        parts += list(_grids([cell for cell in chosen if cell.depth is not None], setting))
    full = {
        (cell.task, cell.num_tokens): (cell.scores.accuracy, cell.scores.half_width)
        for cell in cells
        if cell.method == FULL and cell.setting == "aware" and cell.depth is None and cell.scores is not None
    }
    if full:
        parts += ["## Full KV: accuracy by length", tasks_by_length(full)]
    names = dict.fromkeys(name for cell in cells if cell.scores is not None for name in cell.scores.named)
    if names:
        parts.insert(len(notes) + 2, _NAMED_LEGEND.format(names=", ".join(names)))
    if any(cell.scores is None for cell in cells):
        parts.append(f"{NOT_MET}: the method cannot meet the budget.")
    return "\n\n".join(parts) + "\n"


def tasks_by_length(measured: Mapping[tuple[str, int], tuple[float, float]]) -> str:
    """Write tasks down, lengths across: accuracy in % with the half width of its 95 % interval.

    Args: measured: accuracy and half width, both 0 to 1, by task and number of tokens.
    """
    lengths = sorted({num_tokens for _, num_tokens in measured})
    lines = ["| task | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---|" * len(lengths)]
    tasks = dict.fromkeys((*TASKS, *(task for task, _ in measured)))
    for task in tasks:
        row = [measured.get((task, num_tokens)) for num_tokens in lengths]
        if any(row):
            texts = [f"{100 * found[0]:.1f} ±{100 * found[1]:.1f}" if found else "" for found in row]
            lines.append(f"| {describe_task(task)} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _comparison(cells: Sequence[Cell]) -> Iterator[str]:
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    heads = ["method", "budget", "kept", "read", *(describe_task(task) for task in tasks)]
    names = list(dict.fromkeys(n for cell in cells if cell.scores is not None for n in cell.scores.named))
    yield "| " + " | ".join([*heads, *names, "NLL", "agreement", "n"]) + " |"
    yield "|---|" + "---|" * (len(heads) + len(names) + 2)
    by_key = {(c.method, c.budget, c.task): c for c in cells}
    for method, budget in dict.fromkeys((cell.method, cell.budget) for cell in cells):
        row = [by_key.get((method, budget, task)) for task in tasks]
        found = [cell for cell in row if cell is not None]
        scores = [cell.scores for cell in found if cell.scores is not None]
        shares = [NOT_MET] * 2
        if scores:
            shares = [
                f"{100 * sum(values) / len(scores):.1f} %"
                for values in ([s.kept_share for s in scores], [s.read_share for s in scores])
            ]
        ends = [NOT_MET] * 2
        if scores:
            ends = [
                f"{sum(s.nll for s in scores) / len(scores):.3f}",
                f"{100 * sum(s.agreement for s in scores) / len(scores):.1f}",
            ]
        counts = sorted({cell.num_examples for cell in found})
        named = [_mean_named(scores, name) for name in names]
        texts = [method, budget, *shares, *map(_accuracy, row), *named, *ends, " to ".join(map(str, counts))]
        yield "| " + " | ".join(texts) + " |"


def _differences(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a row for each method and budget whose answers differ from the full KV's, tokens across."""
    rows: dict[tuple[str, str], list[float]] = {}
    for method, budget in dict.fromkeys((cell.method, cell.budget) for cell in cells):
        of_contender = [c for c in cells if (c.method, c.budget) == (method, budget)]
        scored = [(c.num_examples, c.scores.first_difference) for c in of_contender if c.scores is not None]
        counts = zip_longest(*([n * share for share in shares] for n, shares in scored), fillvalue=0.0)
        if steps := [sum(column) / sum(n for n, _ in scored) for column in counts]:
            rows[method, budget] = steps
    if not rows:
        return
    longest = max(map(len, rows.values()))
    yield "| method | budget | " + " | ".join(f"token {i + 1}" for i in range(longest)) + " |"
    yield "|---|" + "---|" * (longest + 1)
    for (method, budget), steps in rows.items():
        shown = [f"{100 * share:.1f}" for share in (*steps, *(0.0,) * (longest - len(steps)))]
        yield f"| {method} | {budget} | " + " | ".join(shown) + " |"


def _mean_named(scores: Sequence[Scores], name: str) -> str:
    found = [each.named[name] for each in scores if name in each.named]
    return f"{100 * sum(found) / len(found):.1f}" if found else NOT_MET


def _accuracy(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.scores is None:
        return NOT_MET
    text = f"{100 * cell.scores.accuracy:.0f} ±{100 * cell.scores.half_width:.0f}"
    if len(cell.scores.accuracy_by_turn) > 1:
        text += " (" + " ".join(f"{100 * share:.0f}" for share in cell.scores.accuracy_by_turn) + ")"
    return text


def _grids(cells: Sequence[Cell], setting: str) -> Iterator[str]:
    for task in dict.fromkeys(cell.task for cell in cells):
        for method, budget in dict.fromkeys((cell.method, cell.budget) for cell in cells):
            grid = {
                (c.depth, c.num_tokens): c
                for c in cells
                if (c.task, c.method, c.budget) == (task, method, budget)
            }
            lengths = sorted({num_tokens for _, num_tokens in grid})
            yield f"## {describe_task(task)}, {method} at {budget}, {setting}: depth by length"
            lines = ["| depth | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---|" * len(lengths)]
            for depth in sorted({depth for depth, _ in grid if depth is not None}):
                texts = [_accuracy(grid.get((depth, num_tokens))) for num_tokens in lengths]
                lines.append(f"| {depth:g} | " + " | ".join(texts) + " |")
            yield "\n".join(lines)
