"""`kvferry plan` and `kvferry calibrate machine` as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtest.command import kvferry


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
