"""`kvferry doctor` on this machine: what is well, what is wrong, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest import faulty_kernels
from kvtest.command import kvferry
from kvtest.redis_server import RedisServer

from kvferry.kernels import dispatch, quarantine
from kvferry.shared.device import cuda_driver
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.doctor import kernels, links, machine, model
from kvferry.tools.doctor.report import Finding, as_json, as_table, guarded, is_well

CPU = torch.device("cpu")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton's interpreter, as on a user's machine."""
    monkeypatch.delenv("TRITON_INTERPRET")


@pytest.mark.usefixtures("clean_environment")
def test_a_cpu_machine_is_well_and_the_report_is_json(redis_server: RedisServer) -> None:
    command = [
        Path(sys.executable).with_name("kvferry"),
        "doctor",
        "--json",
        "--history-redis",
        redis_server.url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["is_well"]
    by_check = {finding["check"]: finding for finding in report["findings"]}
    for check in (
        "device",
        "threads",
        "memory",
        "torch dense_decode",
        "torch window_scores",
        "wire, loopback",
    ):
        assert by_check[check]["verdict"] in ("ok", "warn"), by_check[check]
    for check in ("wire, loopback", "redis", "copy", "bandwidth dense_decode"):
        assert by_check[check]["data"]["bytes_s"] > 0
    for check in ("driver", "compiler", "graph", "clocks", "host to device", "bandwidth kivi"):
        assert by_check[check]["verdict"] == "skip"
    # C code where there is a compiler
    for check in ("bandwidth trizone", "bandwidth hsa"):
        assert by_check[check]["verdict"] in ("ok", "skip")
    assert report["packages"]["torch"] == torch.__version__


@pytest.mark.usefixtures("clean_environment")
def test_a_device_that_is_not_there_and_an_unreachable_redis_fail_with_advice() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = kvferry("doctor", "--device", "cuda", "--history-redis", "redis://127.0.0.1:1/0")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("device") and " fail " in line for line in lines)
    assert any(line.startswith("redis") and " fail " in line for line in lines)
    assert any("->" in line and "Redis" in line for line in lines)
    assert lines[-1].endswith("wrong")


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("options", [("--model", "/nowhere"), ("--device", "tpu")])
def test_options_that_mean_nothing_are_refused(options: tuple[str, ...]) -> None:
    assert kvferry("doctor", *options).returncode == 2


def test_a_kernel_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.configure("triton", CPU)
    described = model.describe("demo", CPU, "auto")
    # in this process, where the fault is
    monkeypatch.setattr("kvferry.shared.device.self_test.COMMAND", ("false",))
    monkeypatch.setattr(
        kernels, "self_test", lambda role, shape: self_test_here(role, described.shape, "window_scores")
    )
    faulty_kernels.install("window_scores", "exception", monkeypatch.setattr)
    try:
        findings = list(kernels.kernel_findings(described.shape))
    finally:
        dispatch.configure("auto", CPU)
        quarantine.state.by_op = {}
    by_check = {finding.check: finding for finding in findings}
    assert by_check["kernel window_scores"].verdict == "fail"
    assert "device kernel image is invalid" in by_check["kernel window_scores"].found
    assert not is_well(findings)


def self_test_here(role: str, shape: Any, op: str) -> list[Any]:
    from kvferry.shared.device.self_test import run_op

    return [run_op(op, shape)] if role == "prefill" else []


def test_a_wrong_torch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    described = model.describe("demo", CPU, "auto")
    monkeypatch.setattr(kernels, "dense_decode", lambda queries, keys, values, scaling: values[:, :1] * 0)
    verdicts = {finding.check: finding.verdict for finding in kernels.kernel_findings(described.shape)}
    assert verdicts == {"torch dense_decode": "fail", "torch window_scores": "ok"}


def test_memory_that_holds_no_model_one_or_both(monkeypatch: pytest.MonkeyPatch) -> None:
    described = model.describe("demo", CPU, "auto")
    assert described.weight_bytes > 1 << 20
    verdicts = []
    for copies in (0.5, 1.5, 30):
        free = int(copies * described.weight_bytes)
        monkeypatch.setattr(machine, "available_memory_bytes", lambda free=free: free)
        (finding,) = machine.memory_findings(described, CPU)
        verdicts.append((finding.verdict, "--in-process" in finding.advice))
    assert verdicts == [("fail", False), ("warn", True), ("ok", False)]


def test_a_cache_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert machine.cache_finding(tmp_path / "file" / "cache").verdict == "fail"
    assert machine.cache_finding(tmp_path / "cache").verdict == "ok"


def test_more_threads_than_processors_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    (finding,) = machine.thread_findings()
    assert finding.verdict == "warn"
    assert "--threads" in finding.advice


def test_the_wire_moves_bytes() -> None:
    (finding,) = links.wire_findings()
    assert finding.verdict in ("ok", "warn")


def test_a_check_that_raises_is_a_finding() -> None:
    def check() -> list[Finding]:
        raise OSError("no such thing")

    findings = guarded("something", check)
    assert not is_well(findings)
    assert "OSError: no such thing" in as_table(findings)
    assert json.loads(as_json(findings))["findings"][0]["verdict"] == "fail"


@pytest.mark.parametrize(
    ("driver", "cuda", "named"),
    [
        ("550.54.15", "13.0", "needs 580 or newer"),
        ("580.65.06", "13.0", None),
        ("550.54.15", "12.8", None),
        ("470.57", "12.1", "needs 525 or newer"),
        (None, "12.8", "no NVIDIA driver"),
        ("580.65.06", None, "build for CPUs"),
    ],
)
def test_the_driver_is_compared_with_torch_s_cuda(
    driver: str | None, cuda: str | None, named: str | None
) -> None:
    problem = cuda_driver.driver_problem(driver, cuda)
    assert (problem is None) if named is None else (problem is not None and named in problem)


def test_the_driver_s_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert cuda_driver.driver_version(path) is None
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12.3\n"
    )
    assert cuda_driver.driver_version(path) == "580.65.06"


def test_a_worker_that_must_have_cuda_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    cuda_driver.check_device("cpu")
    cuda_driver.check_device("auto")
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: "550.54.15")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigurationError, match=r"the NVIDIA driver is 550\.54\.15.*needs 580"):
        cuda_driver.check_device("cuda:0")
