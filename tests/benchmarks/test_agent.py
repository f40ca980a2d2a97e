"""An agent with tools and growing context ships and prefills little more than what is new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtest.benchmarks import run_benchmark

ROOT = Path(__file__).parents[2]
NUM_TURNS = 6


def test_the_committed_twenty_turns_are_within_the_goals() -> None:
    """Of plans with plain rows. `rdkv` is not: see the results' README."""
    results = ROOT / "benchmarks" / "results" / "agent"
    found = json.loads((results / "twenty-turns.json").read_text())
    assert found["turns"] == 20
    for plan in ("rocketkv:1024", "rocketkv:512", "snapkv:1024", "snapkv:512"):
        for measured in found["plans"][plan].values():
            assert len(measured["turns"]) == 20
            assert measured["turns"][-1]["prompt_tokens"] > 15 * measured["turns"][0]["prompt_tokens"]
            assert measured["shipped_bytes"] <= 0.4 * measured["whole_bytes"]
            new_tokens = sum(turn["new_tokens"] for turn in measured["turns"])
            assert measured["new_tokens"] == new_tokens
            assert measured["prefilled_tokens"] <= 1.1 * new_tokens
    whole = json.loads((results / "rdkv.json").read_text())["plans"]["rdkv:1024"]
    for measured in whole.values():
        assert measured["prefilled_tokens"] <= 1.1 * measured["new_tokens"]


@pytest.mark.full
def test_six_turns_ship_and_prefill_what_is_new(tmp_path: Path) -> None:
    output = tmp_path / "agent.json"
    options = ("--turns", str(NUM_TURNS), "--plans", "rocketkv:1024", "--output", output)
    run_benchmark("agent.py", *options)
    figures = json.loads(output.read_text())["plans"]["rocketkv:1024"]
    for measured in figures.values():
        assert measured["shipped_bytes"] == pytest.approx(
            sum(turn["shipped_bytes"] for turn in measured["turns"]), abs=NUM_TURNS * 4096
        )
        assert [turn["history"] for turn in measured["turns"][1:]] == ["delta"] * (NUM_TURNS - 1)
        assert measured["new_tokens"] <= measured["prefilled_tokens"] <= 1.1 * measured["new_tokens"]
        assert measured["shipped_share"] <= 0.4
    # With an id, the answers' KV comes back from decode and is not run again.
    assert figures["session_id"]["prefilled_tokens"] < figures["no_id"]["prefilled_tokens"]
