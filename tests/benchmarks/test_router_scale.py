"""The benchmark of the router's costs runs against a real router, Redis and simulated workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
