"""The benchmark of decode steps on the CPU runs as the documentation says and writes what it printed."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "cpu_decode.py"
BENCHMARKS = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert done.value.code == 0


def test_each_method_is_measured_against_full_and_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    documented = re.search(r"`\.venv/bin/python benchmarks/cpu_decode\.py ([^`]*)`", BENCHMARKS)
    assert documented is not None
    output = tmp_path / "result.json"
    small = ["--models", "demo", "--contexts", "640", "--batch-sizes", "1", "2", "--steps", "2"]
    run([*documented[1].split(), *small, "--output", str(output)], monkeypatch)
    result = json.loads(output.read_text())
    assert [(c["model"], c["context"], c["batch_size"]) for c in result["cells"]] == [
        ("demo", 640, 1),
        ("demo", 640, 2),
    ]
    printed = capsys.readouterr().out
    for cell in result["cells"]:
        times = cell["step_ms"]
        assert set(times) == {"full", "rocketkv", "rdkv", "transformers"}
        assert all(f"{name} {ms:8.2f}" in printed for name, ms in times.items())
        assert cell["speedup_over_full"]["rdkv"] == pytest.approx(times["full"] / times["rdkv"])
        assert cell["full_speedup_over_transformers"] == pytest.approx(times["transformers"] / times["full"])
        # so many tokens' K and V in float32
        assert cell["cache_bytes"]["full"] == 640 * 4 * 2 * 2 * 64 * 4
        assert cell["cache_bytes"]["rdkv"] < cell["cache_bytes"]["full"]


def test_stored_steps_are_ahead_where_their_readme_says_so() -> None:
    folder = REPOSITORY / "benchmarks" / "results" / "cpu-decode"
    measured = json.loads((folder / "steps.json").read_text(encoding="utf-8"))["cells"]
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(measured) == 12
    assert all(cell["full_speedup_over_transformers"] > 1 for cell in measured)
    for cell in measured:
        assert cell["speedup_over_full"]["rdkv"] > 1
        assert cell["speedup_over_full"]["rocketkv"] > 1
        ours = [ms for name, ms in cell["step_ms"].items() if name != "transformers"]
        assert max(ours) < cell["step_ms"]["transformers"]
    for cell in measured:
        ratios = [cell["full_speedup_over_transformers"], *cell["speedup_over_full"].values()]
        row = f"| {cell['model']} | {cell['context']:,} | {cell['batch_size']} |"
        (line,) = (line for line in text.splitlines() if line.startswith(row))
        assert line.endswith("| " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
