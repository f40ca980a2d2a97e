"""What the project claims of compression's accuracy holds in the committed results of `kvferry eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/results/eval"
_FULL = "100%"


def accuracies(name: str, setting: str) -> dict[tuple[str, str, str], float]:
    """Accuracy in % by method, budget and task."""
    cells = json.loads((FOLDER / name / "results.json").read_text(encoding="utf-8"))["cells"]
    return {
        (cell["method"], cell["budget"], cell["task"]): 100 * cell["scores"]["accuracy"]
        for cell in cells
        if cell["setting"] == setting
    }


def test_good_selection_is_told_from_bad() -> None:
    found = accuracies("separation", "aware")
    full = found["full", _FULL, "single_needle"]
    lost = {
        method: full - found[method, "10%", "single_needle"]
        for method in ("snapkv", "random", "streamingllm")
    }
    assert lost["snapkv"] <= 5
    assert lost["random"] >= 70
    assert lost["streamingllm"] >= 60


def test_a_method_that_needs_the_question_falls_below_one_that_does_not() -> None:
    found = accuracies("separation-agnostic", "agnostic")
    assert found["snapkv", "10%", "multi_key_8"] < found["compactor", "10%", "multi_key_8"]


@pytest.mark.parametrize("task", ["third_turn", "fifth_turn"])
@pytest.mark.parametrize("budget", ["25%", "10%", "5%"])
def test_selecting_afresh_beats_selecting_once_and_is_near_the_oracle(task: str, budget: str) -> None:
    afresh, once = accuracies("turns", "aware"), accuracies("turns", "once")
    assert afresh["rocketkv", budget, task] > once["rocketkv", budget, task]
    assert afresh["rocketkv", budget, task] >= afresh["exact-topk", budget, task] - 2


def test_a_window_of_32_answers_as_often_as_one_of_128_where_each_turn_selects() -> None:
    found = accuracies("rocketkv-window", "aware")
    ours, papers = (found[name, "3%", "third_turn"] for name in ("rocketkv", "rocketkv:window=128"))
    assert ours >= papers - 1
    assert ours >= found["full", _FULL, "third_turn"] - 1
