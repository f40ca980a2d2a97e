"""What a selection loses because it sees only the question is measured as its results say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "answer_queries.py"
METHODS = ("rdkv", "compactor-rdkv", "rdkv-union")


@pytest.mark.full
def test_every_weight_is_measured_at_every_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "limit.json"
    monkeypatch.setattr(
        "sys.argv", [str(SCRIPT), "--examples", "1", "--tokens", "300", "--output", str(output)]
    )
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert done.value.code == 0
    cells = json.loads(output.read_text())["cells"]
    assert {(cell["task"], cell["weighed_by"], cell["share"]) for cell in cells} == {
        (task, *of)
        for task in ("code_listing", "multi_key_8")
        for of in [
            ("full", 1.0),
            *((name, share) for name in (*METHODS, "answer") for share in (0.025, 0.01)),
        ]
    }
    printed = capsys.readouterr().out
    for cell in cells:
        assert f"exact {cell['exact']:6.1%}" in printed
        assert cell["exact"] == 1 or cell["weighed_by"] != "full"


def test_at_a_hundredth_of_the_bytes_listings_want_the_answers_own_queries() -> None:
    result = json.loads((BENCHMARKS / "results/answer-queries/limit.json").read_text(encoding="utf-8"))
    assert "--examples 100 " in result["command"]
    exact = {(cell["task"], cell["weighed_by"], cell["share"]): cell["exact"] for cell in result["cells"]}
    full = exact["code_listing", "full", 1.0]
    assert exact["code_listing", "answer", 0.01] >= full - 0.03
    assert all(exact["code_listing", name, 0.01] <= full - 0.1 for name in METHODS)
    assert exact["code_listing", "rdkv-union", 0.025] >= full - 0.03
    assert exact["multi_key_8", "answer", 0.01] >= exact["multi_key_8", "full", 1.0] - 0.02
