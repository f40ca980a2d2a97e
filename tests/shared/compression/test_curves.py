"""Curves on disk read back as they were written, and promise no more than they were fitted on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.models import SHIPPED_CALIBRATION
from kvferry.shared.compression.calibrations import calibration_folder
from kvferry.shared.compression.curves import (
    Calibration,
    CurveBook,
    ModelCurves,
    Observation,
    QualityCurve,
    estimate_context_nll,
    load_curves,
)
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.evaluation.fitting import quality_curve, save_curves

CURVE = QualityCurve(
    calibration=Calibration(alpha=-4.0, beta=1.0),
    lowest_nll=2.0,
    highest_nll=3.0,
    observations=(Observation(retention=0.1, nll=2.5, quality=0.8),),
)
FILE = ModelCurves(
    model="m",
    fingerprints={"float32": "a" * 64, "float16": "b" * 64},
    curves={"snapkv": CURVE},
    origin={"command": "kvferry calibrate", "samples": 3},
)


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = save_curves(tmp_path / "new" / "folder", FILE)
    assert path.name == "m-aaaaaaaa.quality.json"
    assert load_curves(path) == FILE


def test_another_method_joins_the_file_and_the_same_one_is_replaced(tmp_path: Path) -> None:
    save_curves(tmp_path, FILE)
    other = replace(CURVE, lowest_nll=1.0)
    path = save_curves(tmp_path, replace(FILE, curves={"rocketkv": other}))
    assert load_curves(path).curves == {"snapkv": CURVE, "rocketkv": other}
    save_curves(tmp_path, replace(FILE, curves={"snapkv": other}))
    assert load_curves(path).curves == {"snapkv": other, "rocketkv": other}


def test_a_curve_serves_every_dtype_of_its_model_and_no_other_model(tmp_path: Path) -> None:
    save_curves(tmp_path, FILE)
    book = CurveBook.read(str(tmp_path))
    assert book.find("a" * 64, "snapkv") == book.find("b" * 64, "snapkv") == CURVE
    assert book.find("c" * 64, "snapkv") is None
    assert book.find("a" * 64, "rocketkv") is None
    assert book.methods("b" * 64) == ("snapkv",)
    assert book.methods("c" * 64) == ()


def test_the_folders_curve_replaces_a_shipped_one_of_the_same_method(tmp_path: Path) -> None:
    (shipped,) = (load_curves(path) for path in SHIPPED_CALIBRATION.glob("*.quality.json"))
    fingerprint = shipped.fingerprints["float16"]
    save_curves(tmp_path, replace(shipped, curves={"snapkv": CURVE}))
    book = CurveBook.read(str(tmp_path))
    assert book.find(fingerprint, "snapkv") == CURVE != shipped.curves["snapkv"]
    assert book.find(fingerprint, "h2o") == shipped.curves["h2o"]


def test_without_a_setting_the_users_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CurveBook.read("").methods("a" * 64) == ()
    save_curves(calibration_folder(""), FILE)
    assert calibration_folder("") == tmp_path / ".cache" / "kvferry" / "calibration"
    assert CurveBook.read("").find("a" * 64, "snapkv") == CURVE
    (tmp_path / "other").mkdir()
    assert CurveBook.read(str(tmp_path / "other")).methods("a" * 64) == ()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="m-aaaaaaaa"):
        save_curves(tmp_path / "file", FILE)


@given(quality=st.floats(0.001, 1.0), nll=st.floats(0, 20))
def test_a_retention_keeps_the_promise_of_the_curve_and_lies_above_0(quality: float, nll: float) -> None:
    retention = CURVE.retention_at(quality, nll=nll)
    assert 0 < retention <= 1
    within = min(max(nll, CURVE.lowest_nll), CURVE.highest_nll)
    slope = CURVE.calibration.alpha * within + CURVE.calibration.beta
    predicted = quality_curve(torch.tensor(retention), torch.tensor(slope)).item()
    assert predicted >= quality - 1e-9


def test_contexts_beyond_those_measured_are_taken_for_the_nearest() -> None:
    assert CURVE.retention_at(0.9, nll=9.0) == CURVE.retention_at(0.9, nll=3.0)
    assert CURVE.retention_at(0.9, nll=0.1) == CURVE.retention_at(0.9, nll=2.0)
    assert CURVE.retention_at(0.9, nll=2.0) != CURVE.retention_at(0.9, nll=3.0)


def test_no_retention_is_below_the_least_that_was_measured() -> None:
    steep = replace(CURVE, calibration=Calibration(alpha=0.0, beta=-500.0))
    assert steep.calibration.retention(0.95, nll=2.5) < 0.01
    assert steep.retention_at(0.95, nll=2.5) == steep.retention_at(0.01, nll=2.5) == 0.1


def test_a_prompt_is_judged_by_its_own_tokens() -> None:
    prompt = [i * i % 97 for i in range(300)]
    nll = estimate_context_nll(prompt, vocab_size=100)
    assert CURVE.lowest_nll < nll < CURVE.highest_nll
    assert CURVE.retention(0.95, prompt, vocab_size=100) == CURVE.retention_at(0.95, nll=nll)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"curves": {"snapkv": {"alpha": 1}}},
        {
            "curves": {
                "snapkv": {"measure": "nll", "alpha": "x", "beta": 0, "lowest_nll": 0, "highest_nll": 1}
            }
        },
        {
            "curves": {
                "snapkv": {"alpha": 1, "beta": 0, "lowest_nll": 0, "highest_nll": 1, "observations": []}
            }
        },
        {
            "curves": {
                "snapkv": {
                    "measure": "speed",
                    "alpha": 1,
                    "beta": 0,
                    "lowest_nll": 0,
                    "highest_nll": 1,
                    "observations": [],
                }
            }
        },
        {
            "curves": {
                "snapkv": {
                    "measure": "nll",
                    "alpha": 1,
                    "beta": 0,
                    "lowest_nll": 2,
                    "highest_nll": 1,
                    "observations": [],
                }
            }
        },
        {"curves": []},
    ],
)
def test_a_file_of_something_else_is_refused_by_its_name(tmp_path: Path, change: dict[str, object]) -> None:
    path = save_curves(tmp_path, FILE)
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **change}), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="m-aaaaaaaa"):
        CurveBook.read(str(tmp_path))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it must be a folder"):
        CurveBook.read(str(tmp_path / "none"))
