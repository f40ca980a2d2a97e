"""`kvferry calibrate` end to end on the demo model, and the calibration that ships with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.models import DEMO_MODEL, SHIPPED_CALIBRATION
from kvferry.services.launcher import cli
from kvferry.shared.compression.curves import CurveBook, load_curves
from kvferry.shared.compression.rdkv.epsilon import load_table
from kvferry.shared.model.checkpoint import model_fingerprint
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.recall.tasks import TASKS

SMALL = ("--length", "256", "--samples", "2", "--threads", "1")


def calibrate(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(["calibrate", *arguments])
    return caught.value.code


def test_epsilon_is_measured_and_written_under_the_models_name(tmp_path: Path) -> None:
    assert calibrate("epsilon", *SMALL, "--epsilon-tables", str(tmp_path / "tables")) == 0
    table = load_table(tmp_path / "tables" / "demo.json")
    for curve in (table.keys, table.values):
        # two more bits divide the step by 5, four more by 17; the error falls with its square
        assert 0.05 < curve[0] < 0.6
        assert 15 < curve[0] / curve[1] < 35
        assert 200 < curve[1] / curve[2] < 400
    assert json.loads((tmp_path / "tables" / "demo.json").read_text())["samples"] == 2
    assert model_fingerprint(DEMO_MODEL, dtype="float16") in table.fingerprints


def test_curves_are_measured_fitted_and_written_for_the_model(
    tmp_path: Path, demo_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--methods", "snapkv,random", "--retentions", "0.05,0.95", "--groups", "2")
    assert calibrate("quality", *SMALL, *arguments, "--calibration", str(tmp_path)) == 0
    (path,) = tmp_path.iterdir()
    found = load_curves(path)
    assert set(found.curves) == {"snapkv", "random"}
    assert {curve.measure for curve in found.curves.values()} == {"agreement"}
    assert found.fingerprints["float32"] == model_fingerprint(demo_model_dir, dtype="float32")
    assert found.origin["command"].startswith("kvferry calibrate quality --length 256")
    for curve in found.curves.values():
        assert len(curve.observations) == 4  # two retentions of two groups
        assert curve.lowest_nll < curve.highest_nll
        most = [o.quality for o in curve.observations if o.retention == 0.95]
        little = [o.quality for o in curve.observations if o.retention == 0.05]
        assert sum(most) > sum(little) or sum(most) == 2
        assert all(o.quality in (0, 1) for o in curve.observations)  # one answer a group
        assert curve.retention_at(0.5, nll=curve.lowest_nll) < curve.retention_at(0.99, nll=curve.lowest_nll)
    assert "snapkv: quality 0.9 at " in capsys.readouterr().err


@pytest.mark.parametrize("measure", ["agreement", "exact", "nll"])
def test_quality_is_what_the_measure_says(tmp_path: Path, tokenizer: ChatTokenizer, measure: str) -> None:
    """Of two own questions, one with an answer that the model never gives."""
    examples = [TASKS["single_needle"].example(num_tokens=256, seed=seed) for seed in (3, 4)]
    records = [
        {
            "context": example.document,
            "question": example.messages[0]["content"].removeprefix(example.document).strip(),
            "answers": ["the mill" if i else example.answer],
        }
        for i, example in enumerate(examples)
    ]
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    options = ("--data", str(data), "--samples", "2", "--groups", "1", "--threads", "1", "--measure", measure)
    methods = ("--methods", "snapkv", "--retentions", "0.5,0.9")
    assert calibrate("quality", *options, *methods, "--calibration", str(tmp_path)) == 0
    (path,) = tmp_path.glob("*.quality.json")
    curve = load_curves(path).curves["snapkv"]
    assert curve.measure == measure
    found = {o.retention: o.quality for o in curve.observations}
    if measure == "nll":
        assert found[0.9] == pytest.approx(1.0, abs=0.2)
        assert found[0.9] != 1.0
    else:  # both answers agree; the one that is right stays right, out of one
        assert found[0.9] == 1.0


def test_a_curve_of_right_answers_needs_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "own.jsonl"
    record = {
        "context": "the castle is red .",
        "question": "which color ?",
        "answers": ["the mill and the sea"],
    }
    data.write_text(json.dumps(record), encoding="utf-8")
    options = ("--data", str(data), "--samples", "1", "--groups", "1", "--measure", "exact", "--threads", "1")
    assert calibrate("quality", *options, "--methods", "snapkv", "--calibration", str(tmp_path)) == 2
    assert "the full KV answers no prompt of a group right; take agreement" in capsys.readouterr().err


def test_prompts_can_come_from_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the old sailor painted the quiet bridge and the red castle . " * 10, encoding="utf-8")
    arguments = ("--text", str(text), "--length", "64", "--samples", "1", "--threads", "1", "--groups", "1")
    assert (
        calibrate(
            "quality",
            *arguments,
            "--methods",
            "random",
            "--retentions",
            "0.1,0.6",
            "--calibration",
            str(tmp_path),
        )
        == 0
    )
    (path,) = tmp_path.glob("*.quality.json")
    observations = load_curves(path).curves["random"].observations
    assert [o.retention for o in observations] == [0.1, 0.6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "kvferry calibrate COMMAND"),
        (("speed",), 'Unknown command "speed". Available commands: epsilon, quality, machine.'),
        (("epsilon", "--table-name", "Mistral-7B"), "choose another name"),
        (("epsilon", "--samples", "0"), "greater than or equal to 1"),
        (("quality", "--methods", "full"), "--methods has 'full'; allowed are snapkv"),
        (("quality", "--methods", "snapkv,"), "comma-separated list"),
        (("quality", "--retentions", "0.5,1.0"), "--retentions has '1.0'; each must be above 0 and below 1"),
        (("quality", "--samples", "2"), "--groups is 4; it must be at most --samples"),
        (("quality", "--length", "100"), "generated samples need at least 256"),
        (("quality", "--measure", "speed"), "input should be 'agreement', 'exact' or 'nll'"),
        (("quality", "--data", "/nowhere/at/all"), "--data /nowhere/at/all cannot be read"),
        (("quality", "--data", "a", "--text", "b"), "--text is b and --data a; give one of them"),
        (("quality", "--text", "/nowhere/at/all"), "--text /nowhere/at/all cannot be read"),
    ],
)
def test_wrong_options_are_code_2_and_say_what_is_allowed(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(*arguments) == 2
    assert message in capsys.readouterr().err


def test_help_shows_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate("--help") == 0
    text = capsys.readouterr().out
    assert "│ epsilon " in text
    assert "│ quality " in text
    for kind, option in (("epsilon", "--epsilon-tables"), ("quality", "--calibration")):
        assert calibrate(kind, "--help") == 0
        assert option in capsys.readouterr().out


def test_the_shipped_calibration_is_of_the_shipped_model(demo_model_dir: Path) -> None:
    """With another demo model: the command that the file names, in place of the file."""
    book = CurveBook.read([SHIPPED_CALIBRATION])
    for dtype in ("float32", "float16", "bfloat16"):
        methods = book.methods(model_fingerprint(demo_model_dir, dtype=dtype))
        assert {"rocketkv", "snapkv", "compactor", "rdkv"} <= set(methods)
    for method in methods:
        curve = book.find(model_fingerprint(demo_model_dir, dtype="float32"), method)
        assert curve is not None
        assert curve.measure == "agreement"
        assert 0 < curve.retention_at(0.8, nll=curve.lowest_nll) < 1
