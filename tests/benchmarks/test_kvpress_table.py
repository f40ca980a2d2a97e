"""kvferry beside kvpress: what the prompts for kvpress are, and how its answers are set beside ours.

`tests/crosscheck/test_kvpress_peer.py` runs kvpress itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import pytest
from kvtest.collection import write_collection, write_lines

from kvferry.services.launcher import cli
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.records import Key, Record, RecordFile, TurnScore

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ANSWERS = ("Paris", "Rome", "Oslo", "Bern")
"""Right ones of four facts; the full cache has all but the last, and gives `LONG` tokens to the third."""
LONG = 12
FLOOR = 1e-4


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kvpress_prompts

    return kvpress_prompts


@pytest.fixture
def table(prompts: ModuleType) -> ModuleType:
    import kvpress_table

    return kvpress_table


def test_prompts_are_those_that_were_measured(
    demo_model_dir: Path, tmp_path: Path, prompts: ModuleType
) -> None:
    folder, out = write_collection(tmp_path / "collection"), tmp_path / "out"
    options = ("--data", str(folder), "--lengths", "512", "--methods", "full,snapkv", "--budgets", "25%")
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", "--model", str(demo_model_dir), *options, "--threads", "1", "--out", str(out)])
    assert end.value.code == 0
    written, records = tmp_path / "prompts.jsonl", out / "records.jsonl"
    arguments = ["--model", str(demo_model_dir), "--data", str(folder), "--output", str(written)]
    assert prompts.main([str(records), *arguments]) == 0
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    full = list(prompts.full_records(prompts.read_records([records])).values())
    assert [line["example"] for line in lines] == [record.key.example for record in full]
    tokenizer = ChatTokenizer.load(demo_model_dir)
    for line, record in zip(lines, full, strict=True):
        assert record.num_compressed_tokens == len(line["prompt"])
        assert tokenizer.decode(line["answer"]) == record.turns[0].text
        assert line["answer"][-1] in line["eos_token_ids"]
        assert line["max_new_tokens"] == 32
        assert 300 < line["num_document_tokens"] < len(line["prompt"])
    assert len({tuple(line["prompt"][: line["num_document_tokens"]]) for line in lines}) == 2
    text = (folder / "documents" / "0.txt").read_text()
    (folder / "documents" / "0.txt").write_text("more .\n" + text)
    with pytest.raises(SystemExit, match="is of another --data"):
        prompts.main([str(records), *arguments])


def record(number: int, method: str, kl: Sequence[float], text: str, **changes: Any) -> Record:
    """Of question `number`, at 5 % of 1,000 bytes."""
    values: dict[str, Any] = {
        **{"fingerprint": "f", "example": f"e{number}", "task": ("fact", "needle")[number % 2]},
        **{"num_tokens": 2048, "depth": None, "held_out": False, "seed": number, "setting": "aware"},
        **{"first_token": "prefill", "answers": "right", "method": method, "digest": method},
        **{"budget": "100%" if method == "full" else "5%", "match": "given" if method == "full" else "kept"},
        **{"kv_dtype": "bfloat16", "max_new_tokens": 32, **changes},
    }
    right = float(ANSWERS[number] in text)
    turn = TurnScore(
        exact=False, contained=True, nll=1.0, agreement=1.0, text=text, scores={"fact": right}, kl=tuple(kl)
    )
    kept = 1000 if method == "full" else 48
    return Record(key=Key(**values), turns=(turn,), kept_bytes=kept, full_bytes=1000, commit="c")


def line(number: int, press: str, kl: Sequence[float], text: str = "", **changes: Any) -> dict[str, Any]:
    """Of `kvpress_peer.py`, at the ratio that 5 % of the bytes are."""
    values = {"example": f"e{number}", "setting": "aware", "press": press, "ratio": 0.95, "text": text}
    sizes = {"num_compressed_tokens": 500, "kept_bytes": 50, "full_bytes": 1000}
    return {**values, **sizes, "kl": kl, "num_same": len(kl), "agreement": 1.0, **changes}


def lengths(number: int) -> int:
    return LONG if number == 2 else 3


def write(folder: Path, ours: Sequence[Record], theirs: Sequence[dict[str, Any]]) -> list[str]:
    """The three files. Returns the options that name them."""
    full = [record(n, "full", [0.0] * lengths(n), "no" if n == 3 else ANSWERS[n]) for n in range(4)]
    RecordFile(folder / "records.jsonl").append([*full, *ours])
    write_lines(
        folder / "prompts.jsonl",
        (
            {
                "example": f"e{n}",
                "answer": [1] * lengths(n),
                "reference": {"score": "fact", "texts": [ANSWERS[n]], "classes": [], "first_line": False},
            }
            for n in range(4)
        ),
    )
    about = {"model": "m", "dtype": "float32", "kvpress": "0.5.5", "transformers": "5.2.0", "torch": "2.13.0"}
    write_lines(folder / "kvpress.jsonl", [{"about": about}, *theirs])
    names = ("prompts", "kvpress", "records")
    return [word for name in names for word in (f"--{name}", str(folder / f"{name}.jsonl"))]


OURS, BETTER, WORSE = (0.02, 0.01, 0.08, 0.04), (0.2, 0.02, 0.4, 0.1), (0.1, 0.4, 0.9, 0.9)
"""Mean KL of each question: ours, of the best press, and of one that is better on the first alone."""


def whole_run() -> tuple[list[Record], list[dict[str, Any]]]:
    ours = [
        record(n, "rdkv", [0.0] + [OURS[n] * lengths(n) / (lengths(n) - 1)] * (lengths(n) - 1), ANSWERS[n])
        for n in range(4)
    ]
    theirs = [
        line(n, press, [kl[n]] * lengths(n), ANSWERS[n] if n == 0 else "Bonn")
        for press, kl in (("worse", WORSE), ("snapkv:window_size=32", BETTER))
        for n in range(4)
    ]
    full = [line(n, "full", [0.0] * lengths(n), ratio=0.0, num_same=lengths(n) - (n == 1)) for n in range(4)]
    return ours, [*full, *theirs]


def test_contenders_are_set_beside_the_best_press_question_by_question(
    tmp_path: Path, table: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = whole_run()
    elsewhere = record(0, "rdkv", [9.0] * 3, "", budget="10%")  # where no press was measured
    arguments = [*write(tmp_path, [*ours, elsewhere], theirs), "--output", str(tmp_path / "out")]
    assert table.main(arguments) == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["same_full_answers"] == [3, 4]
    assert {row["budget"] for row in result["ratios"]} == {"5%"}
    (row,) = (
        row
        for row in result["ratios"]
        if (row["task"], row["method"], row["start"]) == ("all tasks", "rdkv", 0)
    )
    logs = [math.log((a + FLOOR) / (b + FLOOR)) for a, b in zip(OURS, BETTER, strict=True)]
    half = 1.96 * stdev(logs) / 2
    assert row["best"] == "kvpress snapkv:window_size=32"
    assert row["num_examples"] == 4
    assert row["ratio"] == pytest.approx(math.exp(fmean(logs)))
    assert (row["lowest"], row["highest"]) == pytest.approx(
        (math.exp(fmean(logs) - half), math.exp(fmean(logs) + half))
    )
    assert row["kl"] == pytest.approx(math.exp(fmean(math.log(kl + FLOOR) for kl in OURS)) - FLOOR)
    assert row["kept_share"] == pytest.approx(0.048)
    by_task = {
        (row["task"], row["method"]): (row["num_examples"], row["ratio"])
        for row in result["ratios"]
        if row["start"] == 0
    }
    assert by_task["needle", "rdkv"] == (2, pytest.approx(math.exp((logs[1] + logs[3]) / 2)))
    assert by_task["fact", "kvpress worse"][1] == pytest.approx(
        math.exp(fmean(math.log((WORSE[n] + FLOOR) / (BETTER[n] + FLOOR)) for n in (0, 2)))
    )
    # one answer is longer than the start of the second part, and one has no interval
    assert {row["start"] for row in result["ratios"]} == {0}
    losses = {loss["method"]: loss for loss in result["losses"] if loss["task"] == "all tasks"}
    assert losses["rdkv"]["num_right"] == losses["kvpress worse"]["num_right"] == 3
    assert (losses["rdkv"]["loss"], losses["kvpress worse"]["loss"]) == (0, pytest.approx(2 / 3))
    text = (tmp_path / "out" / "results.md").read_text()
    assert "to 3 of 4 questions" in text
    assert "- `rdkv`, aware: at most a third of the best press's KL in 1 of 1 cells" in text
    assert f"| `rdkv` | {row['kl']:.2g}, {row['ratio']:.2g} (" in text
    assert (tmp_path / "out" / "kl-aware-2048.png").stat().st_size > 1000
    assert str(tmp_path / "out" / "results.md") in capsys.readouterr().out


def test_only_questions_count_that_every_contender_was_measured_on(tmp_path: Path, table: ModuleType) -> None:
    ours, theirs = whole_run()
    arguments = write(tmp_path, ours, [each for each in theirs if each != theirs[-1]])
    assert table.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    counts = {row["num_examples"] for row in result["ratios"] if row["task"] == "all tasks"}
    assert counts == {3}
    assert {loss["num_examples"] for loss in result["losses"] if loss["task"] == "all tasks"} == {3}


def test_what_cannot_be_compared_is_refused(tmp_path: Path, table: ModuleType) -> None:
    ours, theirs = whole_run()
    cases = {
        "other answers": (ours, [*theirs[:-1], {**theirs[-1], "kl": [0.1] * 7}]),
        "--kv-dtype bfloat16": (
            [record(n, "rdkv", [0.1] * 3, "", kv_dtype="float32") for n in range(2)],
            theirs,
        ),
        "no budget has both": ([], theirs),
    }
    for number, (message, (records, lines)) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        arguments = write(tmp_path / str(number), records, lines)
        with pytest.raises(SystemExit, match=message):
            table.main([*arguments, "--output", str(tmp_path / "out")])
