"""The benchmark of short prompts measures the real services and writes what it printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtest.benchmarks import run_benchmark

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "short-prompts" / "demo.json"


@pytest.mark.full
def test_trips_and_batches_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "short.json"
    printed = run_benchmark("short_prompts.py", "--repeats", "1", "--output", output)
    figures = json.loads(output.read_text())
    for row in figures["trips"].values():
        apart, together = row["processes"], row["in_process"]
        assert row["trip_ms"] == pytest.approx(apart["first_ms"] - together["first_ms"])
        assert 0 < apart["prefill_ms"] < apart["first_ms"]
        assert f"{row['prompt_tokens']:>4} tokens: first {apart['first_ms']:.1f} ms" in printed
    for row in figures["batches"].values():
        assert all(ratio > 0 for ratio in row["time_over_alone"].values())


def test_the_committed_result_says_what_the_documents_conclude() -> None:
    """A prefill at decode would save less than the pass itself takes, during which every stream there would
    wait; and a batch of prompts of 64 tokens or more takes as long as its prompts one by one."""
    figures = json.loads(RESULT.read_text())
    for row in figures["trips"].values():
        assert row["trip_ms"] < row["processes"]["prefill_ms"]
    for row in figures["batches"].values():
        if row["prompt_tokens"] >= 64:
            assert min(row["time_over_alone"].values()) > 0.8
