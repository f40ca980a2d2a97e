"""Writes what a run of the tests came to: `pytest --report FILE`.

The file is JSON: the commit, the lane, the order and whether busy loops ran beside it (`make test ORDER=7
STRESS=1`), how many tests passed, failed and skipped, why they skipped, how long it took, and which tests
took longest.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtest.lanes import is_whole

NUM_SLOWEST = 20
OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, metavar="FILE", help="write counts, times and skips as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--report") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report(config))


class _Report:
    """Of the process that a person started, not of xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.getoption("--report")
        self._config, self._begin_s = config, time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        stats: dict[str, list[Any]] = terminalreporter.stats
        seconds: Counter[str] = Counter()
        for report in (each for category in stats.values() for each in category):
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
        is_random = self._config.getoption("random_order_enabled")
        run = {
            "commit": _commit(self._config.rootpath),
            "lane": "all" if is_whole(self._config) else "fast",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "cores": len(os.sched_getaffinity(0)),
            "order": self._config.getoption("random_order_seed") if is_random else None,
            "stressed": bool(os.environ.get("STRESS")),
            "counts": {name: len(stats.get(name, ())) for name in OUTCOMES},
            "seconds": round(time.monotonic() - self._begin_s, 1),
            "skips": dict(Counter(_reason(report) for report in stats.get("skipped", ()))),
            "slowest": [[round(took_s, 2), name] for name, took_s in seconds.most_common(NUM_SLOWEST)],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def _reason(report: Any) -> str:
    """Why a test or a module was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def _commit(folder: Path) -> str:
    """The commit that is checked out; with " and changes" if files differ from it, results apart."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "HEAD") + (" and changes" if changed else "")
