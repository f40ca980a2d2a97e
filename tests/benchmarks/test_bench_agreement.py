"""`kvferry bench` measures what `vllm bench serve` measures, and other clients run, by committed results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "bench"


def test_every_figure_agrees_within_5_percent_under_both_loads() -> None:
    loads = json.loads((RESULTS / "vllm-bench-serve.json").read_text())["loads"]
    assert loads.keys() == {"closed", "even"}
    for load in loads.values():
        assert len(load["medians"]) == 4
        for name, medians in load["medians"].items():
            for client in ("kvferry", "vllm"):
                runs = [run[name] for run in load["runs"][client]]
                assert len(runs) >= 5
                assert medians[client] == pytest.approx(statistics.median(runs))
            assert medians["kvferry"] / medians["vllm"] == pytest.approx(1, abs=0.05)


def test_guidellm_and_aiperf_get_every_answer_whole() -> None:
    found = json.loads((RESULTS / "load-clients.json").read_text())
    loads = [
        load for client in found["clients"].values() for load in client.values() if isinstance(load, dict)
    ]
    assert found["clients"].keys() == {"guidellm", "aiperf"}
    assert len(loads) == 5
    whole = {"complete": found["requests"], "failed": 0, "answer_tokens": found["answer_tokens"]}
    assert all(load == whole for load in loads)
