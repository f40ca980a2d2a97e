"""`kvferry plan` and `kvferry calibrate machine` as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvtest.command import kvferry
from kvtest.tiny_models import make_model

from kvferry.shared.compression.curves import Calibration, ModelCurves, Observation, QualityCurve
from kvferry.shared.model.checkpoint import model_fingerprint
from kvferry.tools.evaluation.fitting import save_curves


def test_the_table_has_each_method_and_says_that_times_are_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = kvferry("plan", "--machine", "L4", "--prompt-tokens", "4000", "--methods", "snapkv,rdkv")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "times are modelled from public figures" in done.stdout
    assert [line.split()[0] for line in lines if line.startswith(("full", "snapkv", "rdkv"))] == [
        "full", "snapkv", "rdkv",
    ]  # fmt: skip
    assert sum(line.startswith("- ") for line in lines) == 2


def test_json_has_the_figures_and_the_advice() -> None:
    done = kvferry("plan", "--json", "--methods", "all", "--rate", "20")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["machine"] == {"name": "H100-SXM", "times": "modelled"}
    assert {"full", "rdkv", "kivi", "quest"} <= plan["methods"].keys()
    rdkv = plan["methods"]["rdkv"]
    assert rdkv["sizes"]["shipped"] < rdkv["sizes"]["full"]
    assert rdkv["workers"] == rdkv["prefill_workers"] + rdkv["decode_workers"]
    assert plan["advice"]["method"] in plan["methods"]


CURVE = QualityCurve(
    calibration=Calibration(alpha=0.0, beta=-3.0),
    lowest_nll=1.0,
    highest_nll=2.0,
    observations=(Observation(retention=0.3, nll=1.5, quality=0.9),),
)


def test_the_plan_says_by_whose_curves_it_is(tmp_path: Path) -> None:
    """None, the family's, the model's own, and those that the user names."""
    folder, curves = make_model("llama", tmp_path / "model"), tmp_path / "curves"
    curves.mkdir()
    options = (
        *("--model", str(folder), "--calibration", str(curves), "--methods", "snapkv,rdkv"),
        *("--machine", "L4", "--prompt-tokens", "1000"),
    )

    def planned(*more: str) -> tuple[dict[str, Any], str]:
        """The plan, and the line that says what is known of quality."""
        done = kvferry("plan", "--json", *options, *more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), kvferry("plan", *options, *more).stdout.splitlines()[1]

    plan, told = planned()
    assert plan["quality_curves"] == {"of": None, "whose": "none", "are_the_models_own": False}
    assert plan["methods"]["snapkv"]["retention"] is None, "the demo's curve is not taken"
    assert "its own budget, and what that loses with this model is not known: no model of its family" in told
    refused = kvferry("plan", *options, "--max-loss", "1")
    assert refused.returncode == 2
    assert "neither this model nor one of its family (llama) has quality curves" in refused.stderr

    save(curves, "other", {"float32": "0" * 64}, family="llama")
    plan, told = planned("--max-loss", "1")
    assert plan["quality_curves"] == {
        "of": "other-00000000", "whose": "family", "are_the_models_own": False,
    }  # fmt: skip
    assert plan["methods"]["snapkv"]["retention"] == CURVE.retention_at(0.99, nll=2.0)
    assert "at most 1 points of answers changed, by curves of other-00000000, a model of its family" in told

    fingerprints = {dtype: model_fingerprint(folder, dtype=dtype) for dtype in ("float32", "bfloat16")}
    save(curves, "mine", fingerprints)
    plan, told = planned()
    assert plan["quality_curves"]["of"] == f"mine-{fingerprints['float32'][:8]}"
    assert plan["quality_curves"]["are_the_models_own"]
    assert plan["methods"]["rdkv"]["retention"] is None, "no other model's curve is mixed in"
    assert "changed, by the model's own curves." in told

    plan, told = planned("--curves-of", "demo", "--max-loss", "5")
    assert plan["quality_curves"]["whose"] == "named"
    assert plan["methods"]["rdkv"]["retention"] is not None
    assert "at most 5 points of answers changed, by curves of demo-550c2155, as --curves-of says" in told
    refused = kvferry("plan", *options, "--curves-of", "qwen")
    assert refused.returncode == 2
    assert "--curves-of is 'qwen'; there are curves of demo-550c2155, mine-" in refused.stderr


def save(folder: Path, model: str, fingerprints: dict[str, str], family: str = "") -> None:
    curves = {"snapkv": CURVE}
    origin = {"family": family}
    save_curves(folder, ModelCurves(model=model, fingerprints=fingerprints, curves=curves, origin=origin))


def test_bounds_that_cannot_be_met_are_code_1_and_mistakes_code_2() -> None:
    assert kvferry("plan", "--first-token-bound-s", "1ms", "--machine", "L4").returncode == 1
    done = kvferry("plan", "--methods", "snapkw")
    assert done.returncode == 2
    assert "--methods is 'snapkw'; did you mean snapkv?" in done.stderr


def test_a_machine_is_measured_and_planned_for(tmp_path: Path) -> None:
    measure = "kvferry.tools.plan.measure"
    file = tmp_path / "machine.json"
    done = kvferry(
        "calibrate", "machine", "--lengths", "64,128,256", "--rounds", "1", "--methods", "snapkv",
        "--machine-name", "mine", "--machine-file", str(file),
        changes={f"{measure}._ALONE": 2, f"{measure}._ANSWER": {1: 6, 4: 6}},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["machine"]["name"] == "mine"
    # each length alone, snapkv with two budgets; two together at the first length
    assert len(written["measured"]) == 3 * (1 + 2) + 2
    done = kvferry("plan", "--json", "--machine", str(file), "--prompt-tokens", "200", "--methods", "all")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["machine"] == {"name": "mine", "times": "measured"}
    assert plan["methods"].keys() == {"full", "snapkv"}
    assert plan["model"]["dtype"] == "float32"
    assert 0 < plan["methods"]["full"]["prefill_s"] < 5
    done = kvferry("plan", "--machine", str(file), "--methods", "kivi")
    assert done.returncode == 2
    assert "was measured with methods full, snapkv, not 'kivi'" in done.stderr
