"""Writes README's accuracy tables from the result files of `kvferry eval`.

    python benchmarks/results_table.py [--readme README.md] [--check]

README names the files itself, relative to its folder, in the comment before the tables:

    <!-- results of benchmarks/results/eval/kept/results.json ... -->
    (tables)
    <!-- end of results -->

A table for each file's settings: a row a method, a column a task, one accuracy for each budget, n/a where a
method cannot meet it. --check changes nothing and fails where README is not what the files say. Measures
nothing; needs no packages.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
_SECTION = re.compile(r"(<!-- results of ([^>]+?) -->\n).*?(<!-- end of results -->)", re.DOTALL)
_SETTINGS = {
    "aware": "Query-aware: the question is in the prompt when it is compressed",
    "once": "Selected once: the first turn's selection serves all turns",
    "agnostic": "Query-agnostic: the document is compressed before any question",
}
_MATCH = {"kept": "bytes kept", "read": "bytes read per decode step", "given": "budgets as given"}
_FULL = "100%"

Cell = dict[str, Any]


def rendered(readme: str, folder: Path) -> str:
    """README with its tables made anew. Args: folder: what the files' paths are relative to."""

    def tables(section: re.Match[str]) -> str:
        results = [json.loads((folder / name).read_text(encoding="utf-8")) for name in section[2].split()]
        text = "\n\n".join(table for result in results for table in _tables(result))
        return f"{section[1]}\n{text}\n\n{section[3]}"

    changed, count = _SECTION.subn(tables, readme)
    if count != 1:
        raise SystemExit(f"README has {count} places for results; it must have one")
    return changed


def _tables(result: dict[str, Any]) -> Iterator[str]:
    cells = [cell for cell in result["cells"] if cell["depth"] is None]
    for setting, heading in _SETTINGS.items():
        for num_tokens in sorted({c["num_tokens"] for c in cells if c["setting"] == setting}):
            chosen = [c for c in cells if (c["setting"], c["num_tokens"]) == (setting, num_tokens)]
            yield "\n".join(_table(result, chosen, f"{heading}; {num_tokens:,} tokens"))


def _table(result: dict[str, Any], cells: Sequence[Cell], heading: str) -> Iterator[str]:
    names = result.get("tasks", {})
    tasks = list(dict.fromkeys(c["task"] for c in cells))
    budgets = [b for b in dict.fromkeys(c["budget"] for c in cells) if b != _FULL]
    found = {(c["method"], c["task"], c["budget"]): c for c in cells}
    counts = sorted({c["num_examples"] for c in cells})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    error = max((_standard_error(c) for c in cells), default=0.0)
    shares = " / ".join(budget.removesuffix("%") for budget in budgets)
    match = _MATCH[result["match"].partition(":")[0]]
    yield f"**{heading}.**"
    yield f"Exact match in % at {shares} % of the full KV's bytes ({match}), n = {number} a cell, standard"
    yield f"errors at most {error:.0f} points."
    yield ""
    yield "| method | " + " | ".join(names.get(task, task.replace("_", " ")) for task in tasks) + " |"
    yield "|---|" + "---|" * len(tasks)
    for method in dict.fromkeys(c["method"] for c in cells):
        texts = []
        for task in tasks:
            whole = found.get((method, task, _FULL))
            row = [whole] if whole else [found.get((method, task, budget)) for budget in budgets]
            texts.append(" / ".join(_accuracy(cell) for cell in row))
        yield f"| `{method}` | " + " | ".join(texts) + " |"


def _accuracy(cell: Cell | None) -> str:
    if cell is None or cell["scores"] is None:
        return "n/a"
    return f"{100 * cell['scores']['accuracy']:.0f}"


def _standard_error(cell: Cell) -> float:
    """Of a share of right answers, in points."""
    if cell["scores"] is None:
        return 0.0
    share: float = cell["scores"]["accuracy"]
    return 100 * math.sqrt(share * (1 - share) / cell["num_examples"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where README is stale")
    options = parser.parse_args(argv)
    before = options.readme.read_text(encoding="utf-8")
    after = rendered(before, options.readme.parent)
    if options.check:
        if after != before:
            sys.stderr.write("README's tables are not what its result files say; run this without --check\n")
        return int(after != before)
    options.readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
