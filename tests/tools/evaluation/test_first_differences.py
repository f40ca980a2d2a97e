"""Where answers first differ from the full KV's: recorded for each answer, and averaged by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.experiment import Experiment, read_experiment
from kvferry.tools.evaluation.records import FORMAT, Key, Record, RecordFile, TurnScore
from kvferry.tools.evaluation.runner import UnitRunner
from kvferry.tools.evaluation.summary import summarise
from kvferry.tools.evaluation.table import markdown


@pytest.fixture
def experiment() -> Experiment:
    return read_experiment(
        EvalConfig(methods="full,random", budgets="20%", lengths="256", examples=4, tasks="single_needle")
    )


def records_of(experiment: Experiment, num_same: Sequence[int | None]) -> dict[Key, Record]:
    """Of "full" no difference, of "random" one after so many of 5 tokens; 5: none."""
    found = {}
    for unit, same in zip(experiment.units(), num_same, strict=True):
        for contender in experiment.contenders:
            count = 5 if contender.method == "full" else same
            turn = TurnScore(
                exact=count == 5, contained=False, nll=0, agreement=float(count == 5), text="", num_same=count
            )
            key = Key.of("model", experiment, unit, "aware", contender)
            found[key] = Record(key=key, turns=(turn,), kept_bytes=1, read_bytes=1, full_bytes=1)
    return found


def test_shares_are_of_all_examples_by_the_token_that_differs_first(experiment: Experiment) -> None:
    full, random = summarise(experiment, "model", records_of(experiment, (0, 2, 2, 5)))
    assert full.scores is not None
    assert random.scores is not None
    assert full.scores.first_difference == ()
    assert random.scores.first_difference == (0.25, 0.0, 0.5)
    assert (full.scores.right, random.scores.right) == ("1111", "0001")
    table = markdown((full, random), title="t", notes=())
    assert "| method | budget | token 1 | token 2 | token 3 |" in table
    assert "| random | 20% | 25.0 | 0.0 | 50.0 |" in table


def test_nothing_is_reported_of_records_that_do_not_say(experiment: Experiment, tmp_path: Path) -> None:
    records = records_of(experiment, (0, 2, 2, 5))
    lines = []
    for record in records.values():
        line = {"format": FORMAT, **asdict(record)}
        for turn in line["turns"]:
            del turn["num_same"]  # as it was recorded before
        lines.append(json.dumps(line))
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    cells = summarise(experiment, "model", RecordFile(tmp_path / "records.jsonl").records)
    assert [cell.scores.first_difference for cell in cells if cell.scores is not None] == [(), ()]
    assert "First differences" not in markdown(cells, title="t", notes=())


def test_an_answer_differs_first_where_its_greedy_tokens_leave_the_full_ones(
    model: TransformersModel, tokenizer: ChatTokenizer
) -> None:
    wanted = read_experiment(
        EvalConfig(methods="full,random", budgets="60t", match="given", lengths="256", examples=1)
    )
    runner = UnitRunner(model, tokenizer, wanted)
    (unit, *_) = wanted.units()
    work = tuple(("aware", contender) for contender in wanted.contenders)
    full, random = runner.run([(unit, work)])
    answers = [tokenizer.encode(record.turns[0].text) for record in (full, random)]
    shared = next((i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), None)
    assert shared is not None
    assert random.turns[0].num_same == shared
    assert full.turns[0].num_same == len(answers[0]) + 1  # and the end token
