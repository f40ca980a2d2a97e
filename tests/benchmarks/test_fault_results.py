"""The committed results of the chaos suite and the soak say what their readmes say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
OFFLINE = sorted((RESULTS / "chaos").glob("offline-*.json"))
PHASES = {"blocks", "control", "decode", "http", "prefill", "redis", "router"}
MIN_FAULTS = 5000
MAX_REQUEST_S = 60.0


def test_five_thousand_faults_broke_nothing():
    runs = [json.loads(path.read_text()) for path in OFFLINE]
    assert [run["violations"] for run in runs] == [[]] * len(runs)
    assert max(run["longest_request_s"] for run in runs) <= MAX_REQUEST_S
    num_faults = sum(run["faults_that_struck"] for run in runs)
    assert num_faults >= MIN_FAULTS
    assert {kind.split(":")[0] for run in runs for kind in run["faults"]} == PHASES
    readme = (RESULTS / "chaos" / "README.md").read_text()
    assert f"{num_faults:,} faults" in readme
    assert f"{sum(run['requests_with_the_oracle_s_tokens'] for run in runs):,} answers" in readme


@pytest.mark.parametrize("path", OFFLINE, ids=lambda path: path.stem)
def test_no_two_runs_had_the_same_seeds(path):
    seeds = [
        range(seed, seed + run["rounds"])
        for run in (json.loads(its.read_text()) for its in OFFLINE)
        for seed in (int(re.findall(r"--seed (\d+)", run["command"])[0]),)
    ]
    mine = OFFLINE.index(path)
    assert all(not set(seeds[mine]) & set(its) for n, its in enumerate(seeds) if n != mine)


def test_nothing_grew_in_thirty_minutes():
    run = json.loads((RESULTS / "soak" / "demo.json").read_text())
    assert run["growing"] == []
    assert run["leaked_arena_bytes"] == {}
    assert run["violations"] == []
    assert run["longest_request_s"] <= MAX_REQUEST_S
    assert sum(run["faults"].values()) > 100
    assert "--minutes 30" in run["command"]
    readme = (RESULTS / "soak" / "README.md").read_text()
    assert f"{run['right']:,} answers" in readme
    assert (RESULTS / "soak" / "demo.png").exists()
