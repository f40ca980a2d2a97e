"""Writes measured numbers into README and docs from the result files that commands wrote.

    python benchmarks/results_table.py [--check] [--root FOLDER] [PAGE ...]

Pages name the files themselves, relative to the repository, in comments:

    <!-- results of benchmarks/results/eval/readme/results.json methods=full,snapkv settings=aware -->
    (tables of `kvferry eval`; without methods= and settings=, all of them)
    <!-- end of results -->

    took <!-- value benchmarks/results/first-answer/cpu.json total_s .0f -->56<!-- /value --> s

A table for each setting and length: a row per method, a column per task, one accuracy for each budget, n/a
where a method cannot meet it. The last column has the other axis, as a share of the full KV's bytes at each
budget: bytes read per decode step where budgets are bytes kept, and the reverse. A value is a number in a
JSON file, its keys separated by slashes, and a Python format. --check changes nothing and fails where a page
is not what the files say. Measures nothing; needs no packages.
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

ROOT = Path(__file__).parents[1]
_SECTION = re.compile(r"(<!-- results of ([^>]+?) -->\n).*?(<!-- end of results -->)", re.DOTALL)
_VALUE = re.compile(r"(<!-- value (\S+) (\S+) (\S+) -->).*?(<!-- /value -->)", re.DOTALL)
_SETTINGS = {
    "aware": "Query-aware: the question is in the prompt when it is compressed",
    "once": "Selected once: the first turn's selection serves all turns",
    "agnostic": "Query-agnostic: the document is compressed before any question",
}
_MATCH = {"kept": "bytes kept", "read": "bytes read per decode step", "given": "budgets as given"}
_OTHER_AXIS = {"kept": ("read_share", "bytes read, %"), "read": ("kept_share", "bytes kept, %")}
_FULL = "100%"

Cell = dict[str, Any]


def rendered(page: str, root: Path) -> str:
    """The page with current tables and values. Args: root: folder that the files' paths are relative to."""

    def tables(section: re.Match[str]) -> str:
        words = section[2].split()
        chosen = dict(word.split("=", 1) for word in words if "=" in word)
        results = [_read(root / word) for word in words if "=" not in word]
        text = "\n\n".join(table for result in results for table in _tables(result, chosen))
        return f"{section[1]}\n{text}\n\n{section[3]}"

    def value(mark: re.Match[str]) -> str:
        return f"{mark[1]}{_number(_read(root / mark[2]), mark[3]):{mark[4]}}{mark[5]}"

    page, num_sections = _SECTION.subn(tables, page)
    page, num_values = _VALUE.subn(value, page)
    if not num_sections + num_values:
        raise SystemExit("the page has no place for results; it needs a mark, see --help")
    return page


def _number(found: Any, path: str) -> Any:
    """What lies at the path. Keys may have slashes, as those of `compare.py` do; a list's are numbers."""
    if isinstance(found, list):
        found = {str(number): element for number, element in enumerate(found)}
    words = path.split("/")
    for end in range(1, len(words) + 1):
        if (key := "/".join(words[:end])) in found:
            return _number(found[key], "/".join(words[end:])) if end < len(words) else found[key]
    raise SystemExit(f"nothing is at {path!r}; there are {', '.join(found)}")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def marked_pages() -> list[Path]:
    """README and the pages of docs that have marks."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    return [page for page, text in texts.items() if _SECTION.search(text) or _VALUE.search(text)]


def _tables(result: dict[str, Any], chosen: dict[str, str]) -> Iterator[str]:
    methods = chosen["methods"].split(",") if "methods" in chosen else None
    settings = chosen["settings"].split(",") if "settings" in chosen else list(_SETTINGS)
    cells = [
        cell
        for cell in result["cells"]
        if cell["depth"] is None and (methods is None or cell["method"] in methods)
    ]
    for setting in settings:
        for num_tokens in sorted({c["num_tokens"] for c in cells if c["setting"] == setting}):
            of_one = [c for c in cells if (c["setting"], c["num_tokens"]) == (setting, num_tokens)]
            yield "\n".join(_table(result, of_one, f"{_SETTINGS[setting]}; {num_tokens:,} tokens"))


def _table(result: dict[str, Any], cells: Sequence[Cell], heading: str) -> Iterator[str]:
    names = result.get("tasks", {})
    tasks = list(dict.fromkeys(c["task"] for c in cells))
    budgets = [b for b in dict.fromkeys(c["budget"] for c in cells) if b != _FULL]
    found = {(c["method"], c["task"], c["budget"]): c for c in cells}
    counts = sorted({c["num_examples"] for c in cells})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    error = max((_standard_error(c) for c in cells), default=0.0)
    shares = " / ".join(budget.removesuffix("%") for budget in budgets)
    matched = result["match"].partition(":")[0]
    other, title = _OTHER_AXIS.get(matched, _OTHER_AXIS["kept"])
    yield f"**{heading}.**"
    yield f"Exact match in % at {shares} % of the full KV's bytes ({_MATCH[matched]}), n = {number} a cell,"
    yield f"standard errors at most {error:.0f} points."
    yield ""
    columns = [names.get(task, task.replace("_", " ")) for task in tasks]
    yield "| " + " | ".join(["method", *columns, title]) + " |"
    yield "|---|" + "---|" * (len(tasks) + 1)
    for method in dict.fromkeys(c["method"] for c in cells):
        texts = []
        for task in tasks:
            whole = found.get((method, task, _FULL))
            row = [whole] if whole else [found.get((method, task, budget)) for budget in budgets]
            texts.append(" / ".join(_accuracy(cell) for cell in row))
        of_budget = [[found.get((method, task, budget)) for task in tasks] for budget in (_FULL, *budgets)]
        texts.append(" / ".join(_mean(row, other) for row in of_budget if any(row)))
        yield f"| `{method}` | " + " | ".join(texts) + " |"


def _accuracy(cell: Cell | None) -> str:
    if cell is None or cell["scores"] is None:
        return "n/a"
    return f"{100 * cell['scores']['accuracy']:.0f}"


def _mean(cells: Sequence[Cell | None], name: str) -> str:
    """A share's mean over tasks, in %."""
    shares = [cell["scores"][name] for cell in cells if cell is not None and cell["scores"] is not None]
    if not shares:
        return "n/a"
    share = 100 * sum(shares) / len(shares)
    return f"{share:.0f}" if share >= 9.95 else f"{share:.1f}"


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
    parser.add_argument("pages", nargs="*", type=Path, help="default: README and docs, where they have marks")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that files are relative to")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is stale")
    options = parser.parse_args(argv)
    stale = []
    for page in options.pages or marked_pages():
        before = page.read_text(encoding="utf-8")
        after = rendered(before, options.root)
        if after != before:
            stale.append(page)
        if not options.check:
            page.write_text(after, encoding="utf-8")
    if options.check and stale:
        names = ", ".join(page.name for page in stale)
        sys.stderr.write(f"{names}: numbers are not those of the result files; run this without --check\n")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
