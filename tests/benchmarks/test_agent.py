"""An agent with tools and growing context ships and prefills little more than what is new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_TURNS = 6

pytestmark = pytest.mark.xdist_group("stack")


def test_six_turns_ship_and_prefill_what_is_new(tmp_path: Path) -> None:
    output = tmp_path / "agent.json"
    options = ("--turns", str(NUM_TURNS), "--plans", "rocketkv:1024", "--output", str(output))
    done = subprocess.run(
        [sys.executable, "benchmarks/agent.py", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())["plans"]["rocketkv:1024"]
    for ids, first_delta in (("session_id", 1), ("no_id", 2)):
        its = figures[ids]
        assert its["shipped_bytes"] == pytest.approx(
            sum(turn["shipped_bytes"] for turn in its["turns"]), abs=NUM_TURNS * 4096
        )
        assert [turn["history"] for turn in its["turns"][first_delta:]] == ["delta"] * (
            NUM_TURNS - first_delta
        )
        assert its["new_tokens"] <= its["prefilled_tokens"] <= 1.1 * its["new_tokens"]
        assert its["shipped_share"] <= 0.4
    # With an id, the answers' KV comes back from decode and is not run again.
    assert figures["session_id"]["prefilled_tokens"] < figures["no_id"]["prefilled_tokens"]
