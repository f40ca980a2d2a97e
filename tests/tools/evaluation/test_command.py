"""`kvferry eval` end to end on the demo model: files, resumption, mistakes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvferry.services.launcher import cli
from kvferry.shared.process.command_line import option_name
from kvferry.tools.evaluation import jobs
from kvferry.tools.evaluation.config import HIDDEN_OPTIONS, EvalConfig
from kvferry.tools.recall.tasks import TASKS

SMALL = (
    *("--methods", "full,snapkv", "--budgets", "25%", "--tasks", "single_needle,third_turn"),
    *("--lengths", "256", "--settings", "aware,agnostic", "--threads", "1", "--max-new-tokens", "8"),
)


def evaluate(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(["eval", *arguments])
    return caught.value.code


def answers(records: str) -> dict[str, tuple[str, ...]]:
    """The answers' texts by key; likelihoods may differ in their last digits with the batch."""
    lines = [json.loads(line) for line in records.splitlines()]
    return {json.dumps(line["key"]): tuple(t["text"] for t in line["turns"]) for line in lines}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two examples a cell."""
    out = tmp_path_factory.mktemp("eval") / "out"
    assert evaluate(*SMALL, "--examples", "2", "--out", str(out)) == 0
    return out


def test_a_run_writes_cells_tables_and_what_was_run(folder: Path) -> None:
    result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert result["command"].startswith("kvferry eval --methods full,snapkv --budgets 25%")
    assert result["hardware"].endswith("CPU cores")
    assert "prefill" in result["first_token"]
    lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert result["commits"] == sorted({json.loads(line)["commit"] for line in lines})
    cells = {(c["task"], c["setting"], c["method"]): c for c in result["cells"]}
    assert len(cells) == len(result["cells"]) == 8
    assert all(cell["num_examples"] == 2 for cell in cells.values())
    full, snapkv = cells["single_needle", "aware", "full"], cells["single_needle", "aware", "snapkv"]
    assert (full["scores"]["accuracy"], full["scores"]["kept_share"]) == (1.0, 1.0)
    assert full["scores"]["agreement"] == 1.0
    assert full["scores"]["right"] == "11"
    assert full["scores"]["first_difference"] == []
    assert 0.2 < snapkv["scores"]["kept_share"] <= 0.25
    assert len(cells["third_turn", "aware", "full"]["scores"]["accuracy_by_turn"]) == 3
    table = (folder / "results.md").read_text(encoding="utf-8")
    assert "## 256 tokens, agnostic" in table
    assert "| snapkv | 25% | 24." in table


def test_a_second_run_measures_nothing_and_more_examples_only_the_new_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    run_jobs = jobs.run_jobs
    monkeypatch.setattr(
        "kvferry.tools.evaluation.command.run_jobs",
        lambda todo, options: begun.extend(todo) or run_jobs(todo, options),
    )
    records = (folder / "records.jsonl").read_text(encoding="utf-8")
    assert evaluate(*SMALL, "--examples", "2", "--out", str(folder)) == 0
    assert begun == []
    assert (folder / "records.jsonl").read_text(encoding="utf-8") == records

    # a line that was being written when the run was killed is measured again
    (folder / "records.jsonl").write_text(records[:-40], encoding="utf-8")
    assert evaluate(*SMALL, "--examples", "2", "--out", str(folder)) == 0
    assert [(unit.seed, len(work)) for unit, work in begun] == [(1, 1)]
    assert answers((folder / "records.jsonl").read_text(encoding="utf-8")) == answers(records)


def test_own_questions_are_answered_from_their_contexts(tmp_path: Path) -> None:
    """As the tasks' own examples are, with any of the right answers, in batches or alone."""
    lines = []
    for seed in range(3):
        example = TASKS["single_needle"].example(num_tokens=256 + 40 * seed, seed=seed)
        question = example.messages[0]["content"].removeprefix(example.document).strip()
        right = ["never said", example.answer] if seed else [example.answer]
        lines.append({"context": example.document, "question": question, "answers": right})
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    found = {}
    for batch in ("1", "2"):
        out = tmp_path / batch
        arguments = (
            "--methods",
            "full,snapkv",
            "--budgets",
            "25%",
            "--max-new-tokens",
            "8",
            "--threads",
            "1",
        )
        assert evaluate(*arguments, "--data", str(data), "--batch", batch, "--out", str(out)) == 0
        found[batch] = answers((out / "records.jsonl").read_text(encoding="utf-8"))
        cells = json.loads((out / "results.json").read_text(encoding="utf-8"))["cells"]
        assert {(c["task"], c["method"], c["num_examples"]) for c in cells} == {
            ("own.jsonl", "full", 3),
            ("own.jsonl", "snapkv", 3),
        }
        assert {c["method"]: c["scores"]["accuracy"] for c in cells}["full"] == 1.0
        table = (out / "results.md").read_text(encoding="utf-8")
        assert "## own prompts, aware" in table
        # both axes: bytes retained, bytes read
        assert "| method | budget | kept | read | own.jsonl |" in table
    assert found["1"] == found["2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no examples"),
        ("{}", "line 1 of --data"),
        ('{"context": "a", "question": "b", "answers": []}', "at least one"),
        ('{"context": "a", "question": "b", "answers": "c"}', "a list of texts"),
        ('{"context": 1, "question": "b", "answers": ["c"]}', "context and question (text)"),
        ("no json", "line 1 of --data"),
    ],
)
def test_own_questions_without_their_fields_are_refused_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "own.jsonl").write_text(text, encoding="utf-8")
    assert evaluate("--data", str(tmp_path / "own.jsonl"), "--out", str(tmp_path / "out")) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_several_processes_give_the_records_of_one(folder: Path, tmp_path: Path) -> None:
    arguments = (*SMALL, "--examples", "2", "--tasks", "single_needle", "--jobs", "2")
    assert evaluate(*arguments, "--out", str(tmp_path)) == 0
    ours, theirs = ((place / "records.jsonl").read_text(encoding="utf-8") for place in (tmp_path, folder))
    assert len(answers(ours)) == 8
    assert answers(ours).items() <= answers(theirs).items()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plots_show_accuracy_and_needle_grids(folder: Path, tmp_path: Path) -> None:
    assert evaluate(*SMALL, "--examples", "2", "--plots", "--out", str(folder)) == 0
    grid = ("--methods", "full,snapkv", "--budgets", "10%", "--tasks", "single_needle", "--depths", "0,1")
    assert evaluate(*grid, "--lengths", "256", "--examples", "1", "--plots", "--out", str(tmp_path)) == 0
    pictures = [
        folder / "accuracy-aware-256.png",
        folder / "accuracy-agnostic-256.png",
        tmp_path / "needle-single_needle-aware.png",
    ]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert "| depth | 256 |" in (tmp_path / "results.md").read_text(encoding="utf-8")


def test_plots_without_matplotlib_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert evaluate("--plots", "--out", str(tmp_path / "none")) == 2
    assert "pip install 'kvferry[eval]'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "snapkw"), "--methods has 'snapkw'; allowed are full, snapkv, "),
        (("--methods", "snapkv:size=3"), "snapkv has the parameters window, pooling, kernel_size"),
        (("--methods", "snapkv:window=x"), "'x' must be of type int"),
        (("--methods", "rdkv:widths=0+3"), "widths of format 'rdkv' is '0,3'; it must be some of 0,2,4,8,16"),
        (("--tasks", "needle"), "--tasks has 'needle'; allowed are single_needle, "),
        (("--tasks", "single_needle,"), "comma-separated list"),
        (("--settings", "blind"), "allowed are aware, once, agnostic"),
        (("--lengths", "100"), "whole numbers of at least 256"),
        (("--depths", "2"), "depths are 0 to 1"),
        (("--data", "nowhere.jsonl"), "--data nowhere.jsonl cannot be read"),
        (("--methods", "full", "--gap", "9", "--batch", "2"), "with --gap it must be 1"),
        (("--budgets", "64KiB", "--match", "given"), "bytes need --match kept or read"),
        (("--budgets", "own"), "--budgets has own; it needs --match given"),
        (("--match", "rows"), "input should be 'kept', 'read' or 'given'"),
        (("--lengths", "9000", "--examples", "1"), "whose window is 8192"),
    ],
)
def test_wrong_options_are_code_2_and_say_what_is_allowed(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--out", str(tmp_path), *arguments) == 2
    assert message in capsys.readouterr().err


def test_every_option_is_described_and_help_shows_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert evaluate("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in EvalConfig.model_fields.items():
        assert field.description, name
        assert (option_name(name) in text) is (name not in HIDDEN_OPTIONS)
    assert "[default: 50%,25%,10%,5%]" in text


def test_records_of_another_format_are_refused_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").write_text('{"format": 0}\n{"format": 0}\n', encoding="utf-8")
    assert evaluate(*SMALL, "--out", str(tmp_path)) == 2
    assert "line 1 of records.jsonl" in capsys.readouterr().err
