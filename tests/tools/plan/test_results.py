"""The committed comparison of predictions with measured times holds what its README claims."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "plan"
RESULT = json.loads((FOLDER / "two-core-cpu.json").read_text(encoding="utf-8"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_checked_settings_are_twenty_that_the_fit_has_not_seen() -> None:
    checked, fitted = RESULT["checked"], RESULT["measured"]
    settings = {(entry["method"], entry["prompt_tokens"], entry["budget_tokens"]) for entry in checked}
    assert len(settings) == len(checked) == 20
    assert not {entry["prompt_tokens"] for entry in checked} & {entry["num_tokens"] for entry in fitted}
    assert {entry["method"] for entry in checked} == {entry["method"] for entry in fitted}


@pytest.mark.parametrize(("time", "least"), [("first_token", 20), ("per_token", 20)])
def test_predictions_are_within_a_quarter_of_measured_times(time: str, least: int) -> None:
    rows: list[dict[str, Any]] = [entry[time] for entry in RESULT["checked"]]
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
    within = sum(abs(row["error"]) <= 0.25 for row in rows)
    assert within == RESULT[f"{time}_within_25_percent"]
    assert within >= least
    name = {"first_token": "to the first token", "per_token": "per token"}[time]
    assert re.search(rf"^\| {name} \| {within} of 20 \|", README, re.M), (name, within)
