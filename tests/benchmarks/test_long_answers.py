"""The benchmark of long answers: segments run at once are decode's own steps; results say what was run."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.shared.model.loading import load_model
from kvferry.tools.evaluation.distance import DistantModel
from kvferry.tools.oracle import OneProcessGenerator
from kvferry.tools.recall.tasks import TASKS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_answers.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A step's tensors are too small for more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("method", ["snapkv", "snapkv-kivi", "compactor-kivi"])
def test_a_segment_run_at_once_gives_what_decodes_caches_give_token_by_token(
    script: dict[str, Any], method: str
) -> None:
    model = DistantModel(load_model("demo", name="demo", device="cpu", dtype="float32"))
    example = TASKS["single_needle"].example(num_tokens=300, seed=1)
    prompt, answer = example.prompt_token_ids, script["long_answer"](example, 300, 1)
    with torch.inference_mode():
        captured = OneProcessGenerator(model).capture(prompt)
        case = script["Case"](method=method, setting="aware", compacted=True)
        plan = script["plan_of"](model.spec, case, len(prompt), len(answer))
        caches = script["Caches"](model, captured, plan, len(answer))
        blocks = script["Blocks"](model, captured, plan, len(answer))
        stepped = torch.cat(list(script["feed"](model, [caches], [answer[:-1]])))
        together = blocks.feed(model, answer[:-1])
    torch.testing.assert_close(together, stepped, atol=2e-3, rtol=1e-3)
    assert blocks.size_bytes() == caches.size_bytes()
    assert 299 == caches.num_appended == blocks.num_appended


@pytest.mark.full
def test_every_method_is_measured_within_its_bytes(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "long.json"
    arguments = ["--examples", "1", "--tokens", "300", "--processes", "1", "--output", str(output)]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert done.value.code == 0
    result = json.loads(output.read_text())
    measured = {(row["method"], row["setting"]) for row in result["rows"]}
    aware = {(name, "aware") for name in ("full", *script["AWARE"])}
    assert measured == aware | {(name, "agnostic") for name in ("full", *script["AGNOSTIC"])}
    assert [row["method"] for row in result["sizes"]] == list(script["SIZED"])
    assert all(row["compacted"] <= row["all_rows"] for row in result["sizes"])
    printed = capsys.readouterr().out
    for row in result["rows"]:
        assert row["n"] == 1
        assert row["end_share"] == 1 if row["method"] == "full" else row["end_share"] < 1
        assert f"{row['method']:15} {row['setting']:9}" in printed
