"""The benchmark of the router's costs runs against a real router, Redis and simulated workers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from kvtest.benchmarks import run_benchmark

ROOT = Path(__file__).parents[2]


@pytest.mark.full
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
    printed = run_benchmark("router_scale.py", *options, "--output", output)
    result = json.loads(output.read_text())
    assert result["workers"]["2"]["request_cpu_ms"] > 0
    assert result["workers"]["2"]["redis_cpu_ms"] == 0
    assert result["sessions"]["50"]["redis_cpu_ms"] > 0
    for figures in result["streams"]["medians"].values():
        assert figures["gap_ms"] > 40
        assert figures["cpu_ms_per_token"] > 0
    assert "64 streams: a token adds" in printed


def test_committed_costs_do_not_grow() -> None:
    """From the first setting by more than a tenth; those by sessions, which have the same load, lie in it."""
    result = json.loads((ROOT / "benchmarks" / "results" / "router-scale" / "scale.json").read_text())
    assert list(result["workers"]) == ["1", "4", "16"]
    assert list(result["sessions"]) == ["100", "10000", "100000"]
    for kind in ("workers", "sessions"):
        settings = result[kind]
        for name in ("token_cpu_ms", "request_cpu_ms", "redis_cpu_ms"):
            costs = [setting[name] for setting in settings.values()]
            if name == "redis_cpu_ms" and kind == "workers":
                assert costs == [0.0] * len(settings)  # there is none
                continue
            if kind == "workers":
                assert max(costs) <= 1.1 * costs[0], (name, costs)
            else:
                middle = (min(costs) + max(costs)) / 2
                assert all(abs(cost / middle - 1) <= 0.1 for cost in costs), (name, costs)
            for number, setting in settings.items():
                rounds = setting["rounds_cpu_s"][name.removesuffix("_cpu_ms")]
                assert setting[name] == pytest.approx(1e3 * statistics.median(rounds)), number


def test_a_committed_token_costs_less_than_a_tenth_of_a_millisecond() -> None:
    path = ROOT / "benchmarks" / "results" / "router-scale" / "scale.json"
    assert json.loads(path.read_text())["streams"]["added"]["cpu_ms_per_token"] < 0.1
