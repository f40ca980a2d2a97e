"""The model card's tables are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.tools.evaluation.table import tasks_by_length

REPOSITORY = Path(__file__).parents[3]
RESULTS = REPOSITORY / "benchmarks/results/demo-model/accuracy"


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.parametrize(
    ("section", "names"), [("accuracy", ("standard", "long", "longest")), ("held-out", ("held-out",))]
)
def test_tables_are_those_of_the_files(section: str, names: tuple[str, ...], demo_model_dir: Path) -> None:
    card = (demo_model_dir / "README.md").read_text(encoding="utf-8")
    shown = card.partition(f"<!-- {section} -->\n")[2].partition(f"<!-- end of {section} -->")[0]
    measured = [cell for name in names for cell in cells(name)]
    table = {(c["task"], c["num_tokens"]): (c["accuracy"], c["half_width"]) for c in measured}
    assert shown.strip() == tasks_by_length(table)
    assert all(cell["num_examples"] >= 200 for cell in measured)
    assert all(cell["accuracy"] == cell["num_correct"] / cell["num_examples"] for cell in measured)
    assert {cell["held_out"] for cell in measured} == {section == "held-out"}


@pytest.mark.parametrize(
    ("name", "task", "num_tokens", "floor"),
    [
        ("standard", "single_needle", 512, 0.98),
        ("standard", "single_needle", 1024, 0.98),
        ("standard", "single_needle", 2048, 0.98),
        ("standard", "multi_key_8", 512, 0.93),
        ("standard", "multi_key_8", 1024, 0.93),
        ("standard", "multi_key_dense", 1024, 0.88),
        ("standard", "multi_key_hard", 512, 0.7),
        ("standard", "third_turn", 512, 0.92),
        ("standard", "third_turn", 1024, 0.92),
        ("standard", "variables_2_hops", 512, 0.7),
        ("long", "multi_key_8", 4096, 0.88),
        ("longest", "single_needle", 8192, 0.85),
    ],
)
def test_floors_that_count_as_reached_are(name: str, task: str, num_tokens: int, floor: float) -> None:
    (cell,) = (c for c in cells(name) if (c["task"], c["num_tokens"]) == (task, num_tokens))
    assert cell["accuracy"] >= floor


@pytest.mark.parametrize("task", ["single_needle", "multi_key_8"])
def test_distance_costs_less_than_it_did(task: str) -> None:
    """Of prompts of 512 tokens whose question stands far away, to the context's end."""
    found = {}
    for model in ("third", "shipped"):
        result = json.loads((RESULTS.parent / f"gaps/{model}-7500.json").read_text(encoding="utf-8"))
        assert result["gap"] == 7500
        (found[model],) = (c["accuracy"] for c in result["cells"] if c["task"] == task)
    assert found["third"] < 0.3
    assert found["shipped"] > 0.8
