"""The doctor's attention cases: right results, and the bytes that their kernels are counted to touch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import BatchShape
from kvferry.tools.doctor import kernels
from kvferry.tools.doctor.attention import AttentionCase, attention_cases
from kvferry.tools.doctor.report import Finding

CPU = torch.device("cpu")
SHAPE = BatchShape(
    num_layers=1, num_slots=1, num_kv_heads=2, group_size=2, head_dim=64, dtype=torch.float16, device=CPU,
    has_windows=True,
)  # fmt: skip
ARENA_BYTES = {"hsa": 2 << 20, "window_scores": 1 << 20}
"""256 KiB for others."""
CASES = list(attention_cases(SHAPE))
MOST = {"trizone": 1.4, "hsa": 1.2}
"""Times what is needed: scales, positions, scores, lists of tokens, and parts of heads, of which so short a
prompt has one for each width; others also touch descriptors."""


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks" / "gpu"))
    yield importlib.import_module("traffic")
    sys.modules.pop("traffic", None)


@pytest.fixture
def interpreted() -> Iterator[None]:
    if not dispatch.interpreting():
        pytest.skip("kernels are not interpreted")
    dispatch.configure("triton", CPU)
    yield
    dispatch.configure("auto", CPU)


def made(name: str) -> AttentionCase:
    torch.manual_seed(7)
    return attention_cases(SHAPE)[name][1](SHAPE, ARENA_BYTES.get(name, 256 << 10))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CASES)
def test_a_case_s_bytes_are_those_that_its_kernels_touch(name: str, traffic: Any) -> None:
    case = made(name)
    assert case.is_launched
    with traffic.counted_traffic() as found:
        case.run()
    touched = sum(kernel_traffic.distinct_bytes for kernel_traffic in found.values())
    assert case.num_bytes <= touched * 1.001
    assert touched <= MOST.get(name, 1.1) * case.num_bytes


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CASES)
def test_a_case_s_kernels_attend_as_torch_does(name: str) -> None:
    launched = made(name).run().clone()
    dispatch.configure("torch", CPU)
    expected = made(name).run()
    error = (launched.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < 1e-2


def test_each_op_that_runs_as_kernels_or_c_code_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's rows, from the C code's and torch's times: there is no GPU here."""
    monkeypatch.setattr(dispatch, "planned_path", lambda op, device, problem=None: "triton")
    monkeypatch.setattr(kernels, "_seconds", lambda case: case.num_bytes / 1e3)
    findings = {finding.check: finding for finding in kernels.bandwidth_findings(SHAPE)}
    assert list(findings) == ["copy", *(f"bandwidth {name}" for name in CASES)]
    for name in CASES:
        slow = findings[f"bandwidth {name}"]
        assert (slow.verdict, slow.data["path"]) == ("warn", "triton"), slow
        assert "clocks" in slow.advice


def test_a_case_that_raises_is_a_finding_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(case: AttentionCase) -> float:
        if "packed" in case.what:
            raise RuntimeError("an illegal memory access was encountered")
        return case.num_bytes / 1e15

    monkeypatch.setattr(dispatch, "planned_path", lambda op, device, problem=None: "triton")
    monkeypatch.setattr(kernels, "_seconds", spoilt)
    verdicts = {finding.check: finding.verdict for finding in kernels.bandwidth_findings(SHAPE)}
    assert verdicts.pop("bandwidth trizone") == "fail"
    assert set(verdicts.values()) == {"ok"}


def test_no_kernel_is_timed_in_the_interpreter(interpreted: None) -> None:
    findings: list[Finding] = list(kernels.bandwidth_findings(SHAPE))
    assert {finding.verdict for finding in findings[1:]} == {"skip"}
