"""The recommended method and budget: the cheapest that loses at most what is stated, or plainly none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvferry.services.launcher import cli
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.experiment import Contender, Experiment, read_experiment
from kvferry.tools.evaluation.recommendation import Recommendation, describe, paired_interval, recommend
from kvferry.tools.evaluation.records import Key, Record, TurnScore

NUM_EXAMPLES = 4


def measured(
    answers: Mapping[tuple[str, str], Sequence[float] | None],
    *,
    methods: str = "full,snapkv,rocketkv",
    kept: Mapping[tuple[str, str], int] | None = None,
    read: Mapping[tuple[str, str], int] | None = None,
) -> tuple[Experiment, dict[Key, Record]]:
    """Records with these scores by method and budget; None where the budget was not met."""
    experiment = read_experiment(
        EvalConfig(
            methods=methods, budgets="50%,10%", tasks="single_needle", lengths="256", examples=NUM_EXAMPLES
        )
    )
    records = {}
    for contender in experiment.contenders:
        at = contender.method, contender.budget
        for i, unit in enumerate(experiment.units()):
            key = Key.of("f", experiment, unit, "aware", contender)
            values = answers[at]
            turns = () if values is None else (turn(values[i]),)
            size = bytes_of(contender)
            records[key] = Record(
                key=key, turns=turns, kept_bytes=(kept or {}).get(at, size), full_bytes=1000,
                read_bytes=(read or {}).get(at, size),
            )  # fmt: skip
    return experiment, records


def turn(value: float) -> TurnScore:
    """An exact answer or not; a fraction is the data's own score."""
    scores = {} if value in (0, 1) else {"f1": value}
    return TurnScore(exact=value == 1, contained=True, nll=0.0, agreement=1.0, text="", scores=scores)


def bytes_of(contender: Contender) -> int:
    return int(1000 * contender.target.value) if contender.target else 1000


ANSWERS = {
    ("full", "100%"): (1, 1, 1, 0),
    ("snapkv", "50%"): (1, 1, 1, 0),
    ("snapkv", "10%"): (1, 1, 0, 1),  # another example is wrong: no loss on the whole
    ("rocketkv", "50%"): (1, 1, 0, 0),
    ("rocketkv", "10%"): (0, 0, 0, 0),
}


def found(recommendations: Sequence[Recommendation]) -> list[tuple[str, str, str] | None]:
    return [
        (recommendation.by, recommendation.found.method, recommendation.found.budget)
        if recommendation.found is not None
        else None
        for recommendation in recommendations
    ]


def test_the_fewest_bytes_within_the_stated_loss_are_recommended() -> None:
    experiment, records = measured(ANSWERS, read={("rocketkv", "50%"): 50})
    by_bytes = recommend(experiment, "f", records, max_loss=0.01)
    assert found(by_bytes) == [("kept", "snapkv", "10%"), ("read", "snapkv", "10%")]
    assert by_bytes[0].found is not None
    assert (by_bytes[0].found.loss, by_bytes[0].found.num_examples, by_bytes[0].full) == (0, 4, 0.75)
    # a quarter may be lost: rocketkv at 50 % reads less than all others
    more = recommend(experiment, "f", records, max_loss=0.25)
    assert found(more) == [("kept", "snapkv", "10%"), ("read", "rocketkv", "50%")]
    (kept, read) = describe(more, max_loss=0.25, score="exact match")
    assert kept.startswith(
        "aware, by bytes kept: snapkv at 10%, 10.0 % of the full KV's bytes, loses 0.0 points"
    )
    assert read.startswith("aware, by bytes read per step: rocketkv at 50%, 5.0 % of")
    assert "loses 25.0 points (95 % interval -" in read
    assert read.endswith(", n = 4).")


def test_where_none_qualifies_the_report_says_so_and_names_the_least_loss() -> None:
    poor = dict.fromkeys(ANSWERS, (0, 1, 0, 0)) | {
        ("full", "100%"): (1, 1, 1, 1),
        ("snapkv", "50%"): (1, 1, 0, 0),
    }
    experiment, records = measured(poor)
    by_bytes = recommend(experiment, "f", records, max_loss=0.2)
    assert found(by_bytes) == [None, None]
    line = next(describe(by_bytes, max_loss=0.2, score="exact match"))
    assert line.startswith(
        "aware, by bytes kept: none qualifies; the least loss has snapkv at 50%, 50.0 % of"
    )
    assert line.endswith("above the stated 20.")


def test_a_budget_that_was_not_met_everywhere_is_not_recommended() -> None:
    experiment, records = measured({**ANSWERS, ("snapkv", "10%"): None})
    assert found(recommend(experiment, "f", records, max_loss=0.01)) == [
        ("kept", "snapkv", "50%"),
        ("read", "snapkv", "50%"),
    ]
    nothing = {at: values if at[0] == "full" else None for at, values in ANSWERS.items()}
    experiment, records = measured(nothing)
    (line, _) = describe(
        recommend(experiment, "f", records, max_loss=0.01), max_loss=0.01, score="exact match"
    )
    assert "no method met a budget" in line


def test_without_a_reference_there_is_no_recommendation() -> None:
    experiment, records = measured(ANSWERS, methods="snapkv")
    (line,) = describe(recommend(experiment, "f", records, max_loss=0.01), max_loss=0.01, score="exact match")
    assert "--methods has no full" in line
    experiment, records = measured(dict.fromkeys(ANSWERS, (0, 0, 0, 0)))
    (line, _) = describe(
        recommend(experiment, "f", records, max_loss=0.01), max_loss=0.01, score="exact match"
    )
    assert "the full KV itself has 0 % of exact match" in line


def test_the_datas_own_score_counts_where_there_is_one() -> None:
    values = {at: (0.5, 0.5, 0.5, 0.5) for at in ANSWERS} | {
        ("snapkv", "10%"): (0.5, 0.5, 0.5, 0.4),
        ("rocketkv", "10%"): (0.5, 0.5, 0.5, 0.3),
    }
    experiment, records = measured(values)
    (kept, _) = recommend(experiment, "f", records, max_loss=0.03)
    assert kept.found is not None
    assert (kept.found.method, kept.found.budget) == ("snapkv", "10%")
    assert kept.found.loss == pytest.approx(0.025)
    assert kept.full == 0.5


def test_the_interval_of_paired_differences_has_a_width_without_differences_and_narrows_with_examples() -> (
    None
):
    low, high = paired_interval([0.0] * 20)
    assert low == -high
    assert 0.05 < high < 0.2
    assert paired_interval([0.0] * 200)[1] < high / 5
    # Agresti and Min: (b + c + 1 - (b - c)^2 / n) / n^2 with b = 6, c = 2, n = 20 + 2
    low, high = paired_interval([1.0] * 6 + [-1.0] * 2 + [0.0] * 12)
    assert (low + high) / 2 == pytest.approx(4 / 22)
    assert (high - low) / 2 == pytest.approx(1.96 * (9 - 16 / 22) ** 0.5 / 22)


def test_a_run_ends_with_the_recommendation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--methods",
        "full,snapkv",
        "--budgets",
        "50%,25%",
        "--tasks",
        "single_needle",
        "--lengths",
        "256",
    )
    options = ("--examples", "2", "--max-new-tokens", "8", "--threads", "1", "--max-loss", "2.5")
    with pytest.raises(SystemExit) as caught:
        cli.main(["eval", *arguments, *options, "--out", str(tmp_path)])
    assert caught.value.code == 0
    table = (tmp_path / "results.md").read_text()
    section = table[table.index("## Recommendation: at most 2.5 points below the full KV's exact match") :]
    lines = [line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")]
    assert len(lines) == 2
    assert lines[0].startswith("aware, by bytes kept: snapkv at ")
    shown = capsys.readouterr().err
    assert all(line in shown for line in lines)
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["max_loss"] == 2.5
    assert [entry["by"] for entry in result["recommendations"]] == ["kept", "read"]
