"""Inputs that fuzzing guided by coverage found, and a few new ones. `benchmarks/fuzz_guided.py` runs many."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvtest.fuzz import TARGETS
from kvtest.fuzz.guided import GUIDED

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_guided.py"
INPUTS = [json.loads(line) for line in (Path(__file__).parent / "guided.jsonl").read_text().splitlines()]
HAS_ATHERIS = bool(os.environ.get("ATHERIS_PATH")) or importlib.util.find_spec("atheris") is not None
NUM_RUNS = 1000


@pytest.mark.parametrize("name", GUIDED)
def test_the_committed_inputs_are_read_or_refused_by_name(name: str) -> None:
    inputs = [base64.b64decode(entry["input"]) for entry in INPUTS if entry["target"] == name]
    assert len(inputs) >= 10
    target = TARGETS[name]()
    try:
        outcomes = {target.read(GUIDED[name].case_of(data)) for data in (b"", *inputs)}
    finally:
        target.close()
    assert len(outcomes) >= 4


@pytest.mark.full
@pytest.mark.skipif(not HAS_ATHERIS, reason="atheris is missing; make atheris installs it where it can")
@pytest.mark.parametrize("name", GUIDED)
def test_inputs_that_coverage_guides_are_read_or_refused_by_name(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name, "--runs", str(NUM_RUNS)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"Done {NUM_RUNS} runs" in done.stderr
