"""The committed runs of the tests themselves passed, and the gate's kept to its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GATE_S, PYTEST_S = 20 * 60.0, 14 * 60.0
"""On two idle cores, with warm caches of packages."""


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def passed(run: dict[str, Any]) -> bool:
    counts = run["counts"]
    return counts["passed"] > 0 and counts["failed"] == counts["error"] == 0


def test_the_gate_passed_within_its_bounds() -> None:
    result = read("test-time/latest.json")
    assert result["exit_code"] == 0
    assert result["seconds"] <= GATE_S
    tests = result["tests"]
    assert (tests["lane"], tests["cores"], len(tests["slowest"])) == ("fast", 2, 20)
    assert passed(tests)
    assert tests["seconds"] <= PYTEST_S


def test_the_whole_tests_passed() -> None:
    run = read("test-all/latest.json")
    assert run["lane"] == "all"
    assert "changes" not in run["commit"]
    assert passed(run)
