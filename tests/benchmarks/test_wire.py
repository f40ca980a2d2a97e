"""The wire benchmark runs as the documentation says and writes what it printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtest.benchmarks import run_benchmark

from kvferry.shared.wire.shared_memory import IS_SUPPORTED

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_wire_benchmark_writes_both_sides_of_each_ratio(tmp_path: Path) -> None:
    output = tmp_path / "wire.json"
    options = ("--megabytes", "64", "--repeats", "1", "--output", output)
    printed = run_benchmark("wire.py", *options)
    results = json.loads(output.read_text())["results"]
    parts = results.pop("parts_cpu_s_per_gb")
    assert set(parts) == {"checksums", "copies"}
    assert set(results) == {"tcp", "ipc", *(["shm"] if IS_SUPPORTED else [])}
    for name, figures in results.items():
        (ours,) = figures["kvferry_gb_s"]
        assert f"{name}: kvferry {ours:.2f} GB/s" in printed
        assert figures["medians"]["gb_s"] == ours
        for (cpu_s_per_gb,) in figures["kvferry_cpu_s_per_gb"].values():
            assert cpu_s_per_gb > 0
        if name in ("tcp", "ipc"):
            (raw,) = figures["raw_zmq_gb_s"]
            assert figures["ratio_of_medians"] == pytest.approx(ours / raw)
