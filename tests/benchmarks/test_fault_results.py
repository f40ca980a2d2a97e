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
        for run in (json.loads(file.read_text()) for file in OFFLINE)
        for seed in (int(re.findall(r"--seed (\d+)", run["command"])[0]),)
    ]
    mine = OFFLINE.index(path)
    assert all(not set(seeds[mine]) & set(other) for n, other in enumerate(seeds) if n != mine)


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


def test_an_attacker_kept_nobody_waiting():
    run = json.loads((RESULTS / "attack" / "demo.json").read_text())
    assert "--seconds 120 " in run["command"]
    assert run["p95_ratio"] <= run["goal"] == 1.5
    assert (run["broken"], run["restarted"]) == ([], [])
    assert {answer.split(":")[0] for answer in run["attacks"]} == {
        *("slow_schema", "deep_schema", "keyless_body", "long_text", "crowd", "stored", "busy")
    }
    readme = (RESULTS / "attack" / "README.md").read_text()
    assert f"{run['p95_ratio']} times" in readme


def test_a_thousand_hostile_grammars_ended_in_time():
    run = json.loads((RESULTS / "hostile-grammars" / "demo.json").read_text())
    assert (run["requests"], run["violations"], run["restarts"]) == (1000, [], 0)
    assert sum(run["by_status"].values()) == 1000
    assert set(run["by_status"]) <= {"200", "400", "429"}
    assert max(each["seconds"] for each in run["slowest"]) < 10
    readme = (RESULTS / "hostile-grammars" / "README.md").read_text()
    assert f"{run['by_status']['400']} were refused" in readme
