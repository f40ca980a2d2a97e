"""First light without a GPU: its stages in small, its limits, and what makes it fail."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kvtest.processes import is_running
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "first_light"
TABLES = {
    "opchecks": "op_checks",
    "kernels": "kernels",
    "tokens": "tokens",
    "doctor": "findings",
    "serve": "bench",
    "long": "prompts",
    "steps": "decode",
    "prefill": "prefill",
    "peers": "peers",
}
"""What a stage fills last."""
ROWS = """
import json, os, subprocess, sys, time
output = sys.argv[sys.argv.index("--output") + 1]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(output + ".part", "w") as file:
    json.dump({"failures": [], "rows": [{"pid": child.pid}]}, file)
os.replace(output + ".part", output)
def hang():
    time.sleep(600)
hang()
"""
"""Writes a row, leaves a child in a session of its own, and does not end."""
FAULTY = f"""
import os, runpy, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, {str(ROOT / "tests" / "helpers")!r})
from kvtest import fast_interpreter, faulty_kernels
from kvferry.kernels.quarantine import quarantine
fast_interpreter.install()
faulty_kernels.install("decoder_ops", "exception")
quarantine("dense_decode", "exception", "planted")
sys.argv[1:1] = ["--check", "--parts", "tokens", "--methods", "full"]
runpy.run_path({str(ROOT / "benchmarks" / "gpu")!r}, run_name="__main__")
"""
"""Tokens with one kernel that is not used from the start, and another that fails when it is."""


@pytest.fixture
def first_light(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`first_light(name)`: a module of the folder, which is no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture
def run_stages(first_light: Any, tmp_path: Path) -> Any:
    """`run_stages(group, ...)`: the results of groups of stages that are commands of Python's."""
    stages, processes = first_light("stages"), first_light("processes")

    def run(*groups: list[tuple[str, float, str]]) -> tuple[Any, dict[str, Any], str]:
        results = processes.Results(tmp_path, ["command"])
        with (tmp_path / "log.txt").open("w") as log:
            for group in groups:
                chosen = [
                    stages.Stage(name=name, limit_s=limit_s, commands=((sys.executable, "-c", code),))
                    for name, limit_s, code in group
                ]
                environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
                processes.run_group(chosen, environment, tmp_path, log, results)
        written = json.loads((tmp_path / "results.json").read_text())
        return results, written, (tmp_path / "log.txt").read_text()

    return run


def command_line(tmp_path: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Run it as a person does. Returns its status, what it printed, and its results."""
    done = subprocess.run(
        [sys.executable, "benchmarks/first_light", *words, "--check", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert (tmp_path / "results.json").exists(), done.stderr
    return done.returncode, done.stdout, json.loads((tmp_path / "results.json").read_text())


def test_the_machine_is_described_and_the_summary_comes_last(tmp_path: Path) -> None:
    status, printed, results = command_line(tmp_path, "env")
    assert status == 0, printed
    assert results["command"][:2] == ["benchmarks/first_light", "env"]
    assert re.fullmatch(r"ended with status 0 after \d+ s", results["env"]["end"])
    values = {row["name"]: row["value"] for row in results["env"]["machine"]}
    assert values["python"] == sys.version.split()[0]
    assert {"torch", "triton", "gpu", "compiler", "commit"} <= values.keys()
    assert printed.endswith((tmp_path / "summary.txt").read_text())
    assert printed.endswith("nothing failed\n")
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_stage_that_there_is_not_is_refused(tmp_path: Path) -> None:
    for words in (("env+kernel",), ("env", "--limit", "kernel=3")):
        done = subprocess.run(
            [sys.executable, str(FOLDER), *words, "--out", str(tmp_path)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert "kernel" in done.stderr
        assert "opchecks, kernels, tokens" in done.stderr


def test_a_stage_over_its_limit_is_killed_with_its_children_and_the_next_one_runs(run_stages: Any) -> None:
    results, written, log = run_stages([("hangs", 5.0, ROWS)], [("next", 60.0, "print('the next one')")])
    # what it had written before
    (row,) = written["hangs"]["rows"]
    assert not is_running(row["pid"])
    assert results.failed
    (failure,) = written["hangs"]["failures"]
    assert failure.startswith("killed: it had not ended after 5 s")
    assert "in hang" in log
    assert not written["next"]["failures"]
    assert re.fullmatch(r"ended with status 0 after \d+ s", written["next"]["end"])
    assert "the next one" in log


def test_stages_of_a_group_run_side_by_side_and_an_error_of_one_ends_no_other(
    run_stages: Any, tmp_path: Path
) -> None:
    """Each waits for a file of the other, so they would not end one after another."""
    wait = (
        "import os, sys, time\nopen({ours!r}, 'w')\nwhile not os.path.exists({theirs!r}): time.sleep(0.05)\n"
    )
    a, b = (str(tmp_path / name) for name in "ab")
    results, written, log = run_stages(
        [
            ("one", 60.0, wait.format(ours=a, theirs=b)),
            ("other", 60.0, wait.format(ours=b, theirs=a) + "raise KeyError('planted')"),
        ]
    )
    assert not written["one"]["failures"]
    assert re.fullmatch(r"ended with status 1 after \d+ s; see log.txt", *written["other"]["failures"])
    assert "KeyError: 'planted'" in log
    assert results.failed
    assert results.write_summary().endswith("FAILED: other\n")


def test_a_quarantined_kernel_and_steps_that_are_not_captured_fail_the_run(run_stages: Any) -> None:
    results, written, _ = run_stages([("tokens", 600.0, FAULTY)])
    assert results.failed
    stage = written["tokens"]
    assert stage["end"].startswith("ended with status 1")
    assert [(row["prefill"], row["path"]) for row in stage["tokens"]] == [
        ("cpu", "eager"),
        ("device", "eager"),
    ]
    quarantined, *eager = stage["failures"]
    assert quarantined.startswith("decoder_ops is quarantined: exception: RuntimeError: Triton Error [CUDA]")
    assert eager == [
        f"full {prefill}: steps ran eagerly, and should be captured" for prefill in ("cpu", "device")
    ]


def test_the_first_failure_is_kept_in_full_and_later_ones_in_a_line(
    first_light: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = first_light("summary").summary
    record = importlib.import_module("record").Record(tmp_path / "record.json")
    for words in ("first\nsecond line", "another"):
        try:
            raise ValueError(words)
        except ValueError as error:
            record.fail("a case", error)
    record.fail("no error")
    fields = json.loads((tmp_path / "record.json").read_text())
    assert fields["failures"] == ["a case: ValueError: first", "a case: ValueError: another", "no error"]
    assert fields["first_failure"].startswith("a case: ValueError: first\nTraceback (most recent call last):")
    assert capsys.readouterr().err == fields["first_failure"]
    assert summary({"steps": fields}).startswith(
        f"steps: {fields['first_failure']}\n==== steps did not end\n"
    )


def test_results_of_a_stage_s_processes_are_one(first_light: Any) -> None:
    merged = first_light("processes").merged
    one = {"failures": ["a"], "seed": 1, "op_checks": [{"shape": "x"}]}
    other = {"failures": [], "seed": 2, "op_checks": [{"shape": "y"}], "first_failure": "b"}
    assert merged([one, {}, other]) == {
        "failures": ["a"], "seed": 1, "op_checks": [{"shape": "x"}, {"shape": "y"}], "first_failure": "b",
    }  # fmt: skip
    assert merged([]) == {"failures": []}


def test_a_summary_has_a_line_for_each_shape_and_row_and_few_failures(first_light: Any) -> None:
    check = {"shape": "seven", "op": "hsa", "problem": None, "launch_s": 1.0, "check_s": 0.5}
    stages = {
        "opchecks": {
            "failures": [f"failure {number}" for number in range(15)],
            "op_checks": [check, {**check, "problem": "nan: two"}, {**check, "skipped": "no time left"}],
        },
        "steps": {
            "failures": [], "end": "ended with status 0 after 9 s",
            "decode": [{"context": 32768, "batch": 1, "method": "full", "path": "graph", "ms_per_token": 7.2}]
        },
    }  # fmt: skip
    lines = first_light("summary").summary(stages).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["====", "opchecks", "did", "not", "end"],
        ["shape", "cases", "wrong", "skipped", "launch_s", "slowest_check_s"],
        ["seven", "2", "1", "1", "2", "0.5"],
    ]
    assert lines[3:16] == [
        *(f"FAILED failure {number}" for number in range(12)),
        "FAILED 3 more, see results.json",
    ]
    assert [line.split() for line in lines[16:]] == [
        ["====", "steps", "ended", "with", "status", "0", "after", "9", "s"],
        ["context", "batch", "method", "path", "ms_per_token"],
        ["32768", "1", "full", "graph", "7.2"],
        [],
        ["FAILED:", "opchecks"],
    ]


def test_a_server_s_log_says_how_long_each_phase_of_its_start_took(first_light: Any) -> None:
    began = datetime(2026, 11, 27, 20, 0, 0, tzinfo=UTC)
    said = (
        ("prefill", "kernel tested", 12.0),
        ("prefill", "kernel tested", 15.0),
        ("prefill", "warm-up", 16.0),
        ("decode", "kernel tested", 20.0),
        ("prefill", "warm-up", 26.5),
        ("prefill", "prefill listens", 26.51),
    )
    lines = [
        json.dumps(
            {"service": service, "event": event, "timestamp": (began + timedelta(seconds=at)).isoformat()}
        )
        for service, event, at in said
    ]
    rows = first_light("serve").startup(["no JSON", "{}", "3", *lines], began)
    assert [(row["service"], row["phase"], row["seconds"]) for row in rows] == [
        ("prefill", "start", 12.0),
        ("prefill", "kernel tested", 3.0),
        ("prefill", "warm-up", 11.5),
        ("decode", "start", 20.0),
    ]


def test_eager_steps_and_quarantined_kernels_of_a_server_are_failures(first_light: Any) -> None:
    metrics = """
# TYPE kvferry_decode_steps counter
kvferry_decode_steps_total{path="graph",reason=""} 90.0
kvferry_decode_steps_total{path="eager",reason="new_shape"} 4.0
kvferry_decode_steps_total{path="eager",reason="capture_failed"} 7.0
# TYPE kvferry_kernel_quarantined gauge
kvferry_kernel_quarantined{op="hsa",reason="nan"} 1.0
"""
    rows, problems = first_light("serve").paths(metrics)
    assert [(row["path"], row["reason"], row["steps"]) for row in rows] == [
        ("graph", "", 90), ("eager", "new_shape", 4), ("eager", "capture_failed", 7),
    ]  # fmt: skip
    assert problems == ["7 steps ran eagerly: capture_failed", "hsa is quarantined: nan"]


def test_where_kvferry_is_not_installed_its_sources_and_the_wheels_are_found(
    first_light: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = first_light("machine")
    monkeypatch.setattr(machine, "_is_installed", lambda: False)
    monkeypatch.setenv("TRITON_PREBUILT_DIR", str(tmp_path / "built"))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    root, work = tmp_path / "root", tmp_path / "work"
    (root / ".whl").mkdir(parents=True)
    work.mkdir()
    with zipfile.ZipFile(root / ".whl" / "planted-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("planted.py", "said = 'from the wheel'\n")
        wheel.writestr(
            "planted-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n"
        )
        wheel.writestr(
            "planted-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("planted-1.0.dist-info/RECORD", "")
    with tarfile.open(root / ".triton.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo("key/kernel.cubin")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"code"))
    with (tmp_path / "log").open("w") as log:
        variables = machine.prepare(work, log, has_gpu=True, root=root)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(root / "src"), str(work / "site"), "/elsewhere"]
    script = "import planted; print(planted.said)"
    printed = subprocess.run(
        [sys.executable, "-c", script],
        env=variables, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert printed.stdout == "from the wheel\n"
    assert (tmp_path / "built" / "key" / "kernel.cubin").read_bytes() == b"code"
    assert variables["TRITON_CACHE_MANAGER"] == "kvferry.kernels.prebuilt_cache:PrebuiltCache"
    monkeypatch.undo()
    # installed, and without a GPU: neither
    with (tmp_path / "log").open("w") as log:
        plain = machine.prepare(work, log, has_gpu=False, root=root)
    assert str(work / "site") not in plain["PYTHONPATH"]
    assert "TRITON_CACHE_MANAGER" not in plain


def test_on_a_gpu_stages_have_the_chosen_model_and_cells(first_light: Any) -> None:
    stages = first_light("stages")
    options = stages.Options(model="Qwen3-8B", cells=("1x1024",), limits={"steps": 90.0})
    made = stages.make_stages(options)
    assert set(made) == {"env", *TABLES}
    assert made["steps"].limit_s == 90
    assert all("--check" not in command for stage in made.values() for command in stage.commands)
    (steps,) = made["steps"].commands
    assert steps[steps.index("--models") + 1] == "Qwen3-8B"
    assert steps[steps.index("--cells") + 1 : steps.index("--methods")] == ("1x1024",)
    tiny = stages.make_stages(replace(options, is_tiny=True))
    assert all("--check" in command for stage in tiny.values() for command in stage.commands)


def test_the_wheels_are_of_versions_that_kvferry_takes() -> None:
    pinned = dict(line.split("==") for line in (FOLDER / "wheels.txt").read_text().split())
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = map(Requirement, described["project"]["dependencies"])
    needed = {requirement.name: requirement.specifier for requirement in requirements}
    ours = needed.keys() & pinned.keys()
    assert {"grpcio", "pydantic", "redis", "pyzmq"} <= ours
    assert all(pinned[name] in needed[name] for name in ours)


@pytest.mark.full
@pytest.mark.parametrize("stage", TABLES)
def test_every_stage_ends_right_at_its_tiny_shape(stage: str, tmp_path: Path) -> None:
    status, printed, results = command_line(tmp_path, stage, "--limit", f"{stage}=800")
    assert status == 0, printed + (tmp_path / "log.txt").read_text()[-3000:]
    rows = results[stage][TABLES[stage]]
    assert rows
    assert not [row for row in rows if "skipped" in row]
    assert f"==== {stage} ended with status 0" in printed
