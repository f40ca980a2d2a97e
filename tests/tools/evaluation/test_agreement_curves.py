"""`kvferry eval` writes quality curves of what it measured, in the form that the router reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.models import DEMO_MODEL
from kvferry.services.launcher import cli
from kvferry.shared.compression.curves import CurveBook, load_curves
from kvferry.shared.model.checkpoint import model_fingerprint
from kvferry.tools.evaluation.agreement_curves import agreement_curves
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.experiment import Experiment, read_experiment
from kvferry.tools.evaluation.records import Key, Record, TurnScore

NLLS = (5.0, 7.0, 6.0, 8.0, 5.5, 7.5, 6.5, 8.5)
"""Of the contexts of eight examples; in groups of two: 5 and 5.5, 6 and 6.5, ..."""


def measured(
    agreements: dict[str, Sequence[float] | None], *, settings: str = "aware", methods: str = "full,snapkv"
) -> tuple[Experiment, dict[Key, Record]]:
    """Records of snapkv with these agreements by budget; None where the budget was not met."""
    experiment = read_experiment(
        EvalConfig(
            methods=methods,
            budgets=",".join(agreements),
            tasks="single_needle",
            lengths="256",
            examples=len(NLLS),
            settings=settings,
        )
    )
    records = {}
    for contender in experiment.contenders:
        if contender.target is None:
            continue
        agreed = agreements[contender.budget]
        for i, unit in enumerate(experiment.units()):
            key = Key.of("f", experiment, unit, experiment.settings[0], contender)
            turns = ()
            if agreed is not None:
                turns = (TurnScore(exact=False, contained=False, nll=1.0, agreement=agreed[i], text=""),)
            share = float(contender.target.value)
            records[key] = Record(key=key, turns=turns, retention=share, context_nll=NLLS[i])
    return experiment, records


def test_quality_is_the_share_of_answers_that_agree_whole_in_groups_of_similar_contexts() -> None:
    experiment, records = measured({"50%": (1,) * 8, "10%": (1, 0.9, 1, 0.2, 1, 1, 0.8, 0)})
    curve = agreement_curves(experiment, "f", records)["snapkv"]
    assert curve.measure == "agreement"
    found = [(o.retention, o.nll, o.quality) for o in curve.observations]
    assert found[:4] == [(0.5, nll, 1.0) for nll in (5.25, 6.25, 7.25, 8.25)]
    assert found[4:] == [(0.1, 5.25, 1.0), (0.1, 6.25, 0.5), (0.1, 7.25, 0.5), (0.1, 8.25, 0.0)]
    assert (curve.lowest_nll, curve.highest_nll) == (5.25, 8.25)
    # the harder the context, the more is retained for the same quality
    assert curve.retention_at(0.9, nll=8.25) > curve.retention_at(0.9, nll=5.25)


@pytest.mark.parametrize(
    ("agreements", "settings", "methods"),
    [
        ({"50%": (1,) * 8}, "aware", "full,snapkv"),  # one budget is no curve
        ({"50%": (1,) * 8, "10%": None}, "aware", "full,snapkv"),
        ({"50%": (1,) * 8, "10%": (0,) * 8}, "agnostic", "full,snapkv"),
        ({"50%": (1,) * 8, "10%": (0,) * 8}, "aware", "full,snapkv:window=16"),
    ],
)
def test_no_curve_is_made_of_too_little_or_of_what_a_router_would_not_use(
    agreements: dict[str, Sequence[float] | None], settings: str, methods: str
) -> None:
    experiment, records = measured(agreements, settings=settings, methods=methods)
    assert agreement_curves(experiment, "f", records) == {}


def test_a_router_reads_the_curves_from_the_output_folder(tmp_path: Path) -> None:
    arguments = (
        *("--methods", "full,random,rdkv", "--budgets", "50%,5%", "--tasks", "single_needle"),
        *("--lengths", "256", "--examples", "2", "--threads", "1", "--max-new-tokens", "6"),
    )
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", *arguments, "--out", str(tmp_path)])
    assert end.value.code == 0
    book = CurveBook(load_curves(path) for path in tmp_path.glob("*.quality.json"))
    fingerprint = model_fingerprint(DEMO_MODEL, dtype="bfloat16")
    assert book.methods(fingerprint) == ("random", "rdkv")
    random, rdkv = (book.find(fingerprint, method) for method in ("random", "rdkv"))
    assert random is not None
    assert rdkv is not None
    for curve in (random, rdkv):
        assert [o.retention < 0.1 for o in curve.observations] == [False, False, True, True]
    assert {o.quality for o in random.observations if o.retention < 0.1} == {0.0}
    assert rdkv.retention_at(0.9, nll=7.0) < random.retention_at(0.9, nll=7.0)
