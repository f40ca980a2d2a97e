"""The benchmark of the router's costs runs against a real router, Redis and simulated workers."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_costs_are_measured_by_workers_and_by_sessions(tmp_path: Path) -> None:
    output = tmp_path / "scale.json"
    options = (
        "--workers",
        "2",
        "--sessions",
        "50",
        "--rounds",
        "1",
        "--requests",
        "8",
        "--stream-tokens",
        "10",
    )
    done = subprocess.run(
        [sys.executable, "benchmarks/router_scale.py", *options, "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["workers"]["2"]["request_cpu_ms"] > 0
    assert result["workers"]["2"]["redis_cpu_ms"] == 0
    assert result["sessions"]["50"]["redis_cpu_ms"] > 0
    for figures in result["streams"]["medians"].values():
        assert figures["gap_ms"] > 40
        assert figures["cpu_ms_per_token"] > 0
    assert "64 streams: a token adds" in done.stdout


@pytest.mark.parametrize(("by", "numbers"), [("workers", [1, 4, 16]), ("sessions", [100, 10_000, 100_000])])
def test_committed_costs_are_flat_within_a_tenth(by: str, numbers: list[int]) -> None:
    """Over all settings, each lies within 10 % of the middle of the least and the greatest."""
    path = ROOT / "benchmarks" / "results" / "router-scale" / "scale.json"
    settings = json.loads(path.read_text())[by]
    assert sorted(map(int, settings)) == numbers
    for name in ("token_cpu_ms", "request_cpu_ms", "redis_cpu_ms"):
        costs = [its[name] for its in settings.values()]
        if name == "redis_cpu_ms" and by == "workers":
            assert costs == [0.0] * len(numbers)  # there is none
            continue
        middle = (min(costs) + max(costs)) / 2
        assert all(abs(cost / middle - 1) <= 0.1 for cost in costs), (name, costs)
        for number, its in settings.items():
            rounds = its["rounds_cpu_s"][name.removesuffix("_cpu_ms")]
            assert its[name] == pytest.approx(1e3 * statistics.median(rounds)), number
