"""The history benchmarks run as the documentation says and write what they printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvtest.benchmarks import run_benchmark

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_a_second_turn_is_measured_from_each_source(tmp_path: Path, redis_server: Any) -> None:
    output = tmp_path / "history.json"
    options = ("--tokens", "600", "--repeats", "1", "--redis", redis_server.url, "--output", output)
    printed = run_benchmark("history.py", *options)
    figures = json.loads(output.read_text())
    assert figures["reused_tokens"]["memory"] == figures["reused_tokens"]["redis"]
    assert figures["reused_tokens"]["memory"][0] > 550
    assert figures["reused_tokens"]["recomputed"] == [0]
    seconds = figures["time_to_first_token_s"]
    for source, ratio in figures["ratio_of_medians"].items():
        assert ratio == pytest.approx(seconds["recomputed"][0] / seconds[source][0])
        assert f"{source}: {seconds[source][0] * 1000:.0f} ms" in printed


@pytest.mark.full
def test_precision_is_measured_in_bytes_and_answers(tmp_path: Path) -> None:
    output = tmp_path / "precision.json"
    run_benchmark("history_precision.py", "--tokens", "300", "--examples", "2", "--output", output)
    results = json.loads(output.read_text())["results"]
    assert list(results) == ["model", "16", "8", "4"]
    sizes = [row["bytes_per_token"] for row in results.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == sizes[0] / 2
    assert results["model"]["agreement"] == 1
