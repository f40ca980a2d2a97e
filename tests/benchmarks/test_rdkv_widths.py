"""The ablation of RDKV's widths runs as its results say and writes what it printed."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rdkv_widths.py"


def test_every_set_of_widths_is_measured_at_the_budgets_that_it_can_keep_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "widths.json"
    arguments = ["--examples", "1", "--tokens", "256", "--output", str(output)]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert done.value.code == 0
    cells = json.loads(output.read_text())["cells"]
    measured = {(cell["task"], cell["widths"], cell["retention"]) for cell in cells}
    sets = ("joint", "tri-state", "evict-only")
    assert measured == {
        (task, *of)
        for task in ("multi_key_8", "single_needle")
        # 2 bits for every token are an eighth of 16, and their headers more than nothing
        for of in [
            *((name, r) for name in sets for r in (0.01, 0.025, 0.0625, 0.125, 0.25)),
            ("quant-only", 0.25),
        ]
    }
    printed = capsys.readouterr().out
    for cell in cells:
        assert cell["attention_error"] > 0
        assert f"NLL {cell['nll']:7.4f}  exact {cell['exact']:6.1%}" in printed
