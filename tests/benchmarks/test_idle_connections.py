"""Idle connections cost a router little memory, a descriptor each, and nobody else any time.
(`benchmarks/idle_connections.py`)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "idle_connections.py"
RESULT = SCRIPT.parent / "results" / "idle-connections" / "cpu.json"
COUNT = 1000
MAX_BYTES_EACH = 64 << 10
"""Those that had their last request in memory took 339 kB."""


def check(result: dict[str, Any], count: int) -> None:
    assert set(result["kinds"]) == {"silent", "kept", "refused"}
    for kind, row in result["kinds"].items():
        assert row["descriptors"] == count, kind
        assert row["descriptors_left"] == 0, kind
        assert row["resident_bytes_each"] <= MAX_BYTES_EACH, (kind, row)
        assert row["growth_bytes_each_of_as_many_again"] <= MAX_BYTES_EACH, (kind, row)
        # CPU time of the router for one chat of others.
        assert row["chat_cpu_ms"] <= 2 * row["chat_cpu_ms_without"] + 5, (kind, row)


def test_the_committed_result_is_of_2000_connections_within_the_bounds() -> None:
    check(json.loads(RESULT.read_text()), 2000)


@pytest.mark.full
def test_idle_connections_cost_what_they_should(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", str(COUNT), "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    if "limit of open files" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(output.read_text()), COUNT)
