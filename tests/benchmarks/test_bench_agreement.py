"""`kvferry bench` measures what `vllm bench serve` measures, by the committed result."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "bench" / "vllm-bench-serve.json"


def test_every_figure_agrees_within_5_percent_under_both_loads() -> None:
    loads = json.loads(RESULT.read_text())["loads"]
    assert loads.keys() == {"closed", "even"}
    for load in loads.values():
        assert len(load["medians"]) == 4
        for name, its in load["medians"].items():
            for client in ("kvferry", "vllm"):
                runs = [run[name] for run in load["runs"][client]]
                assert len(runs) >= 5
                assert its[client] == pytest.approx(statistics.median(runs))
            assert its["kvferry"] / its["vllm"] == pytest.approx(1, abs=0.05)
