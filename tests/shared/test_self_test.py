"""The self-test finds every kind of fault of every kernel, and goes on with the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest import faulty_kernels
from kvtest.lanes import some
from torch import Tensor

from kvferry.kernels import dispatch, quarantine
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.dense_decode import triton_kernel
from kvferry.kernels.descriptors import ROW_FIELDS
from kvferry.kernels.softmax import Scaling, as_softmax
from kvferry.shared.device.kernel_paths import OPS, KernelQuarantine, shown_paths
from kvferry.shared.device.self_test import Limits, ops_with_kernels, run_op, self_test

CPU = torch.device("cpu")
SHAPE = BatchShape(
    num_layers=1, num_slots=1, num_kv_heads=2, group_size=2, head_dim=16, dtype=torch.float32, device=CPU
)
# NumPy's, of the interpreter, where a logarithm of zero is meant to be minus infinity
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
IN_PROCESS = ("wrong_result", "nan", "out_of_resources", "compile_error", "exception")


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    dispatch.configure("triton", CPU)
    yield
    dispatch.configure("auto", CPU)
    quarantine.state.by_op = {}


@pytest.fixture
def child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the tests' own finds `kvtest`."""
    helpers = str(Path(faulty_kernels.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (helpers, os.environ.get("PYTHONPATH")))))


def faulty(ops: list[str], kind: str) -> tuple[str, ...]:
    """A child's command whose kernels fail."""
    return sys.executable, "-P", "-m", "kvtest.faulty_kernels", ",".join(ops), kind


def test_every_kernel_has_cases() -> None:
    assert set(faulty_kernels.LAUNCHES) == set(dispatch.TRITON_OPS)
    tested = {op for role in OPS for op in ops_with_kernels(role, SHAPE)}
    assert tested == set(dispatch.TRITON_OPS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", dispatch.TRITON_OPS)
@pytest.mark.parametrize("kind", IN_PROCESS)
def test_a_fault_is_found_and_named(monkeypatch: pytest.MonkeyPatch, op: str, kind: str) -> None:
    faulty_kernels.install(op, kind, monkeypatch.setattr)
    finding = run_op(op, SHAPE)
    # bytes and integers are never NaN
    is_integer = op in ("knapsack", "pack", "packed_check")
    assert finding.reason == ("wrong_result" if is_integer and kind == "nan" else kind)
    assert finding.detail


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], torch.float32))
@pytest.mark.parametrize("op", dispatch.TRITON_OPS)
def test_a_kernel_that_is_right_passes(op: str, dtype: torch.dtype) -> None:
    shape = BatchShape(**{**SHAPE.__dict__, "dtype": dtype, "head_dim": 24, "group_size": 3})
    finding = run_op(op, shape)
    assert finding.reason is None, finding.detail
    assert finding.num_cases


@pytest.mark.parametrize(("op", "num_cases"), [("dense_decode", 8), ("hsa", 8)])
def test_a_model_with_windows_capped_logits_and_sinks_has_cases_for_them(op: str, num_cases: int) -> None:
    shape = replace(SHAPE, has_windows=True, has_plain_softmax=False)
    finding = run_op(op, shape)
    assert finding.reason is None, finding.detail
    assert finding.num_cases == num_cases


@pytest.mark.parametrize("spoil", some(["sinks", "windows", "caps"], "windows"))
def test_a_kernel_without_windows_caps_or_sinks_is_found(monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    real = triton_kernel.dense_decode_batch

    def ignoring(*args: Any, heads: Tensor, scaling: Scaling, **kwargs: Any) -> None:
        softmax = as_softmax(scaling)
        if spoil == "sinks":
            softmax = replace(softmax, sinks=None)
        elif spoil == "caps":
            softmax = replace(softmax, softcap=0.0)
        else:
            heads = heads[:, :ROW_FIELDS].contiguous()
        real(*args, heads, scaling=softmax, **kwargs)

    def patched(queries: Tensor, keys: Tensor, values: Tensor, heads: Tensor, **kwargs: Any) -> None:
        ignoring(queries, keys, values, heads=heads, **kwargs)

    monkeypatch.setattr(triton_kernel, "dense_decode_batch", patched)
    shape = replace(SHAPE, has_windows=True, has_plain_softmax=False)
    assert run_op("dense_decode", shape).reason == "wrong_result"


@pytest.mark.timeout(900)
def test_a_worker_s_kernels_pass_in_a_process_of_their_own() -> None:
    seen: list[str] = []
    findings = self_test("prefill", SHAPE, progress=seen.append)
    assert [finding.op for finding in findings] == ops_with_kernels("prefill", SHAPE) == seen
    assert all(finding.reason is None for finding in findings), findings
    assert not quarantine.quarantined()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("child_path")
@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("prefill", "hang"),
        pytest.param("decode", "hang", marks=pytest.mark.full),
        pytest.param("decode", "crash", marks=pytest.mark.full),
    ],
)
def test_kernels_that_hang_or_end_their_process_are_quarantined_one_after_another(
    role: str, kind: str
) -> None:
    ops = ops_with_kernels(role, SHAPE)  # type: ignore[arg-type]
    # The interpreter runs a case where a GPU only compiles it; what hangs needs no time for that.
    limits = Limits(compile_s=0.5 if kind == "hang" else 60.0)
    findings = self_test(role, SHAPE, limits=limits, command=faulty(ops, kind))  # type: ignore[arg-type]
    assert {finding.op: finding.reason for finding in findings} == dict.fromkeys(ops, kind)
    assert set(quarantine.quarantined()) == set(ops)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("child_path")
def test_one_fault_does_not_hide_the_others_kernels() -> None:
    findings = self_test("prefill", SHAPE, command=faulty(["window_scores"], "exception"))
    assert {finding.op: finding.reason for finding in findings} == {
        "chunk_scores": None,
        "column_sums": "exception",  # they share a launch
        "decoder_ops": None,
        "dense_decode": None,
        "knapsack": None,
        "pack": None,
        "window_scores": "exception",
    }
    assert shown_paths("prefill", CPU)["window_scores"] == "torch (quarantined: exception)"
    (family,) = KernelQuarantine("prefill").collect()
    labels = [(sample.labels, sample.value) for sample in family.samples]
    assert ({"op": "window_scores", "reason": "exception"}, 1) in labels
    assert [family.samples for family in KernelQuarantine("decode").collect()] == [[]]


def test_without_a_process_of_its_own_the_test_runs_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty_kernels.install("pack", "exception", monkeypatch.setattr)
    findings = self_test("prefill", SHAPE, command=(sys.executable, "-c", "raise SystemExit(1)"))
    assert {finding.op for finding in findings if finding.reason} == {"pack"}


@pytest.mark.usefixtures("child_path")
def test_a_child_ends_with_its_worker() -> None:
    """Even where its kernel hangs."""
    shape = SHAPE.__dict__ | {"dtype": "float32", "device": "cpu"}
    task = {"ops": ["pack"], "shape": shape, "mode": "triton", "num_threads": 1}
    child = subprocess.Popen(
        [*faulty(["pack"], "hang"), json.dumps(task)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child, child.stdin, child.stdout as reports:
        assert json.loads(reports.readline())["phase"] == "ready"
        assert json.loads(reports.readline())["phase"] == "begin"
        child.stdin.close()
        assert child.wait(20) == 1


def test_nothing_is_tested_where_torch_runs_everything() -> None:
    dispatch.configure("auto", CPU)
    assert self_test("decode", SHAPE, command=("false",)) == []
    dispatch.configure("triton", CPU)
    unsupported = BatchShape(**{**SHAPE.__dict__, "head_dim": 12})
    assert self_test("decode", unsupported, command=("false",)) == []
