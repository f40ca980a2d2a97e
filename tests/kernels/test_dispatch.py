"""Dispatch names the path it takes, counts it, and never falls back where Triton was asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvferry.kernels import dispatch
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.dispatch import KernelUnavailable
from kvferry.kernels.native.library import is_available

CPU = torch.device("cpu")


def test_auto_takes_torch_on_the_cpu_and_counts_it() -> None:
    before = dispatch.calls().get(("dense_decode", "torch"), 0)
    rows = torch.randn(1, 3, 8)
    dense_decode(rows[:, :1], rows, rows, scaling=1.0)
    assert dispatch.calls()["dense_decode", "torch"] == before + 1
    paths = dispatch.kernel_paths(CPU)
    native = {op for op, path in paths.items() if path == "native"}
    assert native == (set(dispatch.NATIVE_OPS) if is_available() else set())
    assert {path for op, path in paths.items() if op not in native} == {"torch"}


@pytest.mark.usefixtures("interpreter")
def test_triton_takes_the_interpreter_where_that_is_on_and_counts_it() -> None:
    before = dispatch.calls().get(("dense_decode", "interpreter"), 0)
    rows = torch.randn(1, 3, 16)
    dense_decode(rows[:, :1], rows, rows, scaling=1.0)
    assert dispatch.calls()["dense_decode", "interpreter"] == before + 1
    paths = dispatch.kernel_paths(CPU)
    assert {op for op, path in paths.items() if path == "interpreter"} == set(dispatch.TRITON_OPS)
    assert {op for op, path in paths.items() if path == "torch"} == set(dispatch.TORCH_OPS)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("queries", "rows", "named"),
    [
        (torch.zeros(1, 17, 16), torch.zeros(1, 2, 16), "17 query heads"),
        (torch.zeros(1, 1, 12), torch.zeros(1, 2, 12), "head_dim is 12"),
        (torch.zeros(1, 1, 16), torch.zeros(1, 2, 18)[:, :, :16], "multiples of 16 bytes"),
        (torch.zeros(1, 1, 16, dtype=torch.float64), torch.zeros(1, 2, 16, dtype=torch.float64), "float64"),
    ],
)
def test_a_call_that_no_kernel_serves_is_refused_where_triton_was_asked_for(
    queries: torch.Tensor, rows: torch.Tensor, named: str
) -> None:
    with pytest.raises(KernelUnavailable, match=named):
        dense_decode(queries, rows, rows, scaling=1.0)


def test_a_call_that_no_kernel_serves_takes_torch_under_auto() -> None:
    rows = torch.randn(1, 3, 12)
    assert dense_decode(rows[:, :1], rows, rows, scaling=1.0).isfinite().all()


def test_triton_on_a_device_that_cannot_run_it_is_an_error_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(KernelUnavailable, match="the device is cpu"):
        dispatch.configure("triton", CPU)
    assert dispatch.mode() == "auto"


def test_an_unknown_mode_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="kernels is 'fast'; it must be one of auto, torch, triton"):
        dispatch.configure("fast", CPU)  # type: ignore[arg-type]


@pytest.mark.timeout(900)
def test_every_op_imports_and_runs_where_triton_is_not_installed() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from kvferry.kernels import dispatch
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.column_sums import window_scores
import kvferry.kernels.chunk_scores, kvferry.kernels.column_sums, kvferry.kernels.hsa, kvferry.kernels.trizone
rows = torch.randn(1, 3, 16)
dense_decode(rows[:, :1], rows, rows, scaling=1.0)
window_scores(rows[:, None], rows, scaling=1.0)
try:
    dispatch.configure("triton", torch.device("cpu"))
except dispatch.KernelUnavailable as error:
    assert "not installed" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("dtype", "is_supported"), [(torch.float32, False), (torch.bfloat16, True)])
def test_float32_on_cuda_is_torch_s(dtype: torch.dtype, is_supported: bool) -> None:
    cuda = torch.device("cuda")
    assert (dispatch.shape_problem(dtype, 4, 64, cuda) is None) == is_supported
    assert dispatch.shape_problem(dtype, 4, 64, torch.device("cpu")) is None
