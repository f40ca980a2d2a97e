"""`kvferry plan` and `kvferry calibrate machine` as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FEW_TOKENS = """
import kvferry.tools.plan.measure as measure
measure._ALONE, measure._ANSWER = 2, {1: 6, 4: 6}
"""


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Args: before: code to run before the command."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return subprocess.run(
        [sys.executable, "-c", f"{before}from kvferry.services.launcher.cli import main; main()", *arguments],
        env=clean | {"COLUMNS": "60"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_the_table_has_each_method_and_says_that_times_are_modelled() -> None:
    done = run("plan", "--machine", "L4", "--prompt-tokens", "4000", "--methods", "snapkv,rdkv")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "times are modelled from public figures" in done.stdout
    assert [line.split()[0] for line in lines if line.startswith(("full", "snapkv", "rdkv"))] == [
        "full", "snapkv", "rdkv",
    ]  # fmt: skip
    assert sum(line.startswith("- ") for line in lines) == 2


def test_json_has_the_figures_and_the_advice() -> None:
    done = run("plan", "--json", "--methods", "all", "--rate", "20")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["machine"] == {"name": "H100-SXM", "times": "modelled"}
    assert {"full", "rdkv", "kivi", "quest"} <= plan["methods"].keys()
    rdkv = plan["methods"]["rdkv"]
    assert rdkv["sizes"]["shipped"] < rdkv["sizes"]["full"]
    assert rdkv["workers"] == rdkv["prefill_workers"] + rdkv["decode_workers"]
    assert plan["advice"]["method"] in plan["methods"]


def test_bounds_that_cannot_be_met_are_code_1_and_mistakes_code_2() -> None:
    assert run("plan", "--first-token-bound-s", "1ms", "--machine", "L4").returncode == 1
    done = run("plan", "--methods", "snapkw")
    assert done.returncode == 2
    assert "--methods has 'snapkw'" in done.stderr


@pytest.mark.full
def test_a_machine_is_measured_and_planned_for(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    done = run(
        "calibrate", "machine", "--lengths", "64,128,256", "--rounds", "1", "--methods", "snapkv",
        "--machine-name", "mine", "--machine-file", str(file), before=FEW_TOKENS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["machine"]["name"] == "mine"
    # each length alone, snapkv with two budgets; two together at the first length
    assert len(written["measured"]) == 3 * (1 + 2) + 2
    done = run("plan", "--json", "--machine", str(file), "--prompt-tokens", "200", "--methods", "all")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["machine"] == {"name": "mine", "times": "measured"}
    assert plan["methods"].keys() == {"full", "snapkv"}
    assert plan["model"]["dtype"] == "float32"
    assert 0 < plan["methods"]["full"]["prefill_s"] < 5
    done = run("plan", "--machine", str(file), "--methods", "kivi")
    assert done.returncode == 2
    assert "was measured with methods full, snapkv, not 'kivi'" in done.stderr
