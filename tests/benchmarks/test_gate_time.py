"""The committed time of the gate keeps to its bounds."""

from __future__ import annotations

import json
from pathlib import Path

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "test-time" / "latest.json"
GATE_S, PYTEST_S = 20 * 60.0, 14 * 60.0
"""On two idle cores, with warm caches of packages."""


def test_the_gate_passed_within_its_bounds() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert result["exit_code"] == 0
    assert result["seconds"] <= GATE_S
    tests = result["tests"]
    assert (tests["lane"], tests["cores"], len(tests["slowest"])) == ("fast", 2, 20)
    assert tests["counts"]["failed"] == tests["counts"]["error"] == 0
    assert tests["seconds"] <= PYTEST_S
