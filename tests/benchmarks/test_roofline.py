"""The modelled times of decode steps do not get worse than those that are stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "benchmarks" / "results" / "kernels" / "roofline.json").read_text())
WORSE = 1.03


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("roofline") / "roofline.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu", "--roofline", "--output", str(output)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "modelled, not measured" in done.stdout
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def by_step(result: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        tuple(row[name] for name in ("gpu", "method", "batch", "context")): row for row in result["steps"]
    }


def test_no_step_is_modelled_three_percent_slower_than_stored(fresh: dict[str, Any]) -> None:
    """If one is faster, store the new file: `python benchmarks/gpu --roofline --output ...`."""
    ours, stored = by_step(fresh), by_step(STORED)
    assert ours.keys() == stored.keys()
    slower = {
        key: (row["modelled_ms"], stored[key]["modelled_ms"])
        for key, row in ours.items()
        if row["modelled_ms"] > WORSE * stored[key]["modelled_ms"]
        or row["launches"] > WORSE * stored[key]["launches"]
        or row["read_bytes"] > WORSE * stored[key]["read_bytes"]
    }
    assert not slower


def test_launches_of_a_layer_are_few(fresh: dict[str, Any]) -> None:
    launches = fresh["launches"]
    assert launches["layer"] <= 12
    assert {method: sum(its.values()) for method, its in launches["attention"].items()} == {
        "full": 2, "rocketkv": 3, "rdkv": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("batch", "least"), [(1, 1.85), (7, 6.5)])
@pytest.mark.parametrize("gpu", ["H100-SXM", "H200"])
def test_what_compression_is_modelled_to_gain_at_128k(
    fresh: dict[str, Any], gpu: str, batch: int, least: float
) -> None:
    assert by_step(fresh)[gpu, "rocketkv", batch, 131072]["modelled_speedup"] >= least


def test_measured_steps_have_the_modelled_time_beside_them() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks" / "gpu")!r})
from roofline import add_modelled

row = {{"model": "Llama-3.1-8B", "method": "full", "batch": 7, "context": 131072, "ms_per_token": 50.0}}
rows = [dict(row), dict(row, batch=3), dict(row, model="Qwen3-8B")]
add_modelled(rows, "NVIDIA H100 80GB HBM3")
print(rows[0]["modelled_ms"], rows[1]["modelled_ms"], "modelled_ms" in rows[2])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True
    )
    expected = by_step(STORED)["H100-SXM", "full", 7, 131072]["modelled_ms"]
    assert done.stdout.split() == [str(expected), "None", "False"]


def test_a_layer_with_a_window_takes_its_window_s_bytes_and_two_launches(fresh: dict[str, Any]) -> None:
    assert fresh["window_layers"] == STORED["window_layers"]
    rows = {(row["gpu"], row["window"]): row for row in fresh["window_layers"]}
    row = rows["H100-SXM", 1024]
    launches_us = 4.0
    assert (row["all_rows_modelled_us"] - launches_us) / (row["window_modelled_us"] - launches_us) == (
        pytest.approx(131072 / 1024)
    )


def test_one_long_sequence_among_short_ones_does_not_set_a_layers_time(fresh: dict[str, Any]) -> None:
    """Modelled: near what its bytes take where all programs share them, which is faster than equal splits."""
    rows = {
        tuple(row[name] for name in ("gpu", "kernel", "longest", "others")): row
        for row in fresh["mixed_batches"]
    }
    assert fresh["mixed_batches"] == STORED["mixed_batches"]
    for kernel in ("_dense_decode_kernel", "_kivi_decode_kernel"):
        row = rows["H100-SXM", kernel, 131072, 1024]
        assert row["equal_splits_modelled_us"] > 1.6 * row["splits_by_length_modelled_us"]
    for its in rows.values():
        assert its["splits_by_length_modelled_us"] <= its["equal_splits_modelled_us"]
