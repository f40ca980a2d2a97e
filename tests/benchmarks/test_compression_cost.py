"""The benchmark of compression's share of prefill runs, and stored shares are what their README says."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "compression_cost.py"
FOLDER = REPOSITORY / "benchmarks" / "results" / "compression-cost"


@pytest.mark.full
def test_each_methods_share_of_prefill_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cost.json"
    arguments = ["--lengths", "3000", "--rounds", "1", "--output", str(output)]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert done.value.code == 0
    (cell,) = json.loads(output.read_text(encoding="utf-8"))["cells"]
    assert 2988 <= cell["tokens"] <= 3000
    assert set(cell["share_of_prefill"]) == {"snapkv", "rocketkv", "compactor", "rdkv"}
    printed = capsys.readouterr().out
    for method, share in cell["share_of_prefill"].items():
        assert share == pytest.approx(cell["cpu_ms"][method] / cell["cpu_ms"]["prefill"])
        assert 0 < share < 1
        assert f"{method} {100 * share:.1f} %" in printed


def test_stored_shares_are_those_of_their_readme() -> None:
    measured = json.loads((FOLDER / "cpu.json").read_text(encoding="utf-8"))
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"`{measured['command']}`" in text
    assert len(measured["cells"]) == 2
    for cell in measured["cells"]:
        for method, share in cell["share_of_prefill"].items():
            bound = measured["bounds"][method]
            shares = rf"{100 * share:.1f} \| {100 * bound:.0f} \| (yes|no) \|$"
            row = rf"^\| {cell['tokens']:,} \| `{method}` \| .* \| {shares}"
            (met,) = re.findall(row, text, flags=re.MULTILINE)
            assert met == "yes", (cell["tokens"], method)
            assert share <= bound
