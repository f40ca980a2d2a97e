"""The delta benchmark counts what a conversation ships and what it was spared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtest.benchmarks import run_benchmark

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_bytes_shipped_and_spared_are_counted_by_plan(tmp_path: Path) -> None:
    output = tmp_path / "delta.json"
    options = ("--tokens", "300", "--turns", "3", "--plans", "snapkv:64", "--output", output)
    printed = run_benchmark("delta.py", *options)
    figures = json.loads(output.read_text())["plans"]["snapkv:64"]
    assert figures["shipped_bytes"] == sum(figures["shipped_bytes_by_turn"]) < figures["whole_bytes"]
    assert (
        1 / 3 < figures["share"] == pytest.approx(figures["shipped_bytes"] / figures["whole_bytes"], abs=1e-4)
    )
    assert printed == f"snapkv:64: {figures['share']:.2f} of full re-selection\n"
