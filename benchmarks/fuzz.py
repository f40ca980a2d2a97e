"""Nearly right messages, records, files and requests for everything that reads bytes from outside.

    python benchmarks/fuzz.py frames records --count 1000000 [--seed 1] [--output FILE] [--corpus FILE]

Targets (`tests/helpers/kvtest/fuzz/`): `frames` is a receiver that gets whole transfers, `records` the
manifest, layer and other records in them, `control` the messages of calls, `sessions` session files, `stored`
records and values as in Redis, plain and encrypted, `disk` files of a folder of history, `http` a router that
gets requests made from its own OpenAPI document. A finding is an exception that is not a named error, an
answer that is none, more than 2 s (`http`: 10 s), or more memory than is allowed for a case of its size.
`--case 'frames 1 77'` reads one case again. The exit code is 1 after a finding.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import structlog  # noqa: E402
from kvtest.fuzz import TARGETS  # noqa: E402
from kvtest.fuzz.requests import run_http  # noqa: E402
from kvtest.fuzz.run import Report, case_of, run  # noqa: E402
from rich.progress import Progress, TaskID  # noqa: E402

_REPORT_EVERY = 500


def fuzz(name: str, arguments: argparse.Namespace, progress: Callable[[int], None]) -> Report:
    if name == "http":
        return run_http(seed=arguments.seed, num_messages=arguments.count, progress=progress)
    return run(TARGETS[name](), seed=arguments.seed, num_messages=arguments.count, progress=progress)


def advance(bar: Progress, task: TaskID, count: int) -> None:
    if count % _REPORT_EVERY == 0:
        bar.update(task, completed=count, refresh=True)


def write(path: Path, name: str, report: Report, arguments: argparse.Namespace) -> None:
    """Add a target's run to the file, in place of one with the same seed."""
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    command = f"python benchmarks/fuzz.py {name} --count {arguments.count} --seed {arguments.seed}"
    runs = [entry for entry in result["runs"] if (entry["target"], entry["seed"]) != (name, report.seed)]
    runs.append({"target": name, "command": command, "commit": commit, **report.as_json()})
    result["runs"] = sorted(runs, key=lambda entry: (entry["target"], entry["seed"]))
    path.write_text(json.dumps(result, indent=2) + "\n")


def add_to_corpus(path: Path, name: str, report: Report) -> None:
    """Add the shortest case of each outcome that the corpus lacks."""
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(entry["target"], entry["outcome"]) for entry in entries}
    for outcome, case in report.smallest.items():
        if (name, outcome) not in known and sum(map(len, case)) < 4096:
            text = [base64.b64encode(part).decode() for part in case]
            entries.append({"target": name, "outcome": outcome, "case": text})
    entries.sort(key=lambda entry: (entry["target"], entry["outcome"]))
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def again(where: str) -> None:
    """Read one case in the open, so that its error is shown."""
    name, seed, number = where.split()
    target = TARGETS[name]()
    sys.stdout.write(target.read(case_of(target, int(seed), int(number))) + "\n")
    target.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, "http", []], help="all without any")
    parser.add_argument("--count", type=int, default=10_000, help="messages of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", default="", help="read this one again: TARGET SEED NUMBER")
    parser.add_argument("--output", type=Path, help="JSON file to which the runs are added")
    parser.add_argument("--corpus", type=Path, help="file to which cases with new outcomes are added")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    if arguments.case:
        again(arguments.case)
        return 0
    num_findings = 0
    for name in arguments.targets or [*TARGETS, "http"]:
        # A thread that draws would allocate while a case is measured.
        with Progress(auto_refresh=False) as bar:
            task = bar.add_task(name, total=arguments.count)
            report = fuzz(name, arguments, partial(advance, bar, task))
            bar.update(task, completed=arguments.count, refresh=True)
        num_findings += len(report.findings)
        sys.stdout.write(f"{name}: {json.dumps(report.as_json())}\n")
        if arguments.output:
            write(arguments.output, name, report, arguments)
        if arguments.corpus:
            add_to_corpus(arguments.corpus, name, report)
    return int(num_findings > 0)


if __name__ == "__main__":
    sys.exit(main())
