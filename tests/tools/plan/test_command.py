"""`kvferry plan` and `kvferry calibrate machine` as commands."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_the_plan_is_by_the_models_own_curves_or_says_whose(tmp_path: Path) -> None:
    folder, curves = tmp_path / "model", tmp_path / "curves"
    make_model("llama", folder)
    curves.mkdir()
    options = (
        *("--model", str(folder), "--calibration", str(curves), "--methods", "snapkv,rdkv"),
        *("--machine", "L4", "--prompt-tokens", "1000"),
    )
    done = kvferry("plan", "--json", *options)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["quality_curves"] == {"of": "demo-550c2155", "are_the_models_own": False}
    done = kvferry("plan", *options)
    assert "changed, by curves of demo-550c2155, another model (kvferry calibrate measures" in done.stdout

    curve = QualityCurve(
        calibration=Calibration(alpha=0.0, beta=-3.0),
        lowest_nll=1.0,
        highest_nll=2.0,
        observations=(Observation(retention=0.3, nll=1.5, quality=0.9),),
    )
    fingerprints = {dtype: model_fingerprint(folder, dtype=dtype) for dtype in ("float32", "bfloat16")}
    save_curves(
        curves, ModelCurves(model="mine", fingerprints=fingerprints, curves={"snapkv": curve}, origin={})
    )
    plan = json.loads(kvferry("plan", "--json", *options).stdout)
    assert plan["quality_curves"]["of"] == f"mine-{fingerprints['float32'][:8]}"
    assert plan["quality_curves"]["are_the_models_own"]
    assert plan["methods"]["snapkv"]["retention"] == curve.retention_at(0.99, nll=2.0)
    assert plan["methods"]["rdkv"]["retention"] is None, "the demo's curve is not mixed in"
    assert "changed, by the model's own curves." in kvferry("plan", *options).stdout


def test_bounds_that_cannot_be_met_are_code_1_and_mistakes_code_2() -> None:
    assert kvferry("plan", "--first-token-bound-s", "1ms", "--machine", "L4").returncode == 1
    done = kvferry("plan", "--methods", "snapkw")
    assert done.returncode == 2
    assert "--methods has 'snapkw'" in done.stderr


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
