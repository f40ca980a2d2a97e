"""The GPU benchmark without a GPU: checks in the interpreter, kernels within their gates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results" / "kernels" / "compile.json"


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "benchmarks/gpu", *options],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )


@pytest.mark.timeout(1800)
def test_every_kernel_agrees_with_its_reference_in_the_interpreter(tmp_path: Path) -> None:
    output = tmp_path / "check.json"
    done = run("--check", "--seed", "1", "--output", str(output))
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["kernels"]
    assert {row["row"] for row in rows} == {1, 4, 5, 6, 7, 8}
    assert all(0 <= row["error"] <= row["tolerance"] for row in rows)
    # what the kernels were compared on was neither empty nor the answer itself
    assert any(row["error"] > 0 for row in rows)
    assert done.stdout.splitlines()[0].split() == ["kernel", "model", "shape", "error", "tolerance"]


def test_without_a_gpu_it_measures_nothing_and_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run()
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr


@pytest.mark.timeout(1800)
def test_kernels_compile_for_both_architectures_within_their_gates(tmp_path: Path) -> None:
    """Compiled afresh; the stored table is what the same command wrote."""
    output = tmp_path / "compile.json"
    done = run(
        "--compile", "--models", "8B", "--output", str(output), TRITON_CACHE_DIR=str(tmp_path / "cache")
    )
    assert done.returncode == 0, done.stderr
    fresh = json.loads(output.read_text())["kernels"]
    stored: list[dict[str, Any]] = json.loads(STORED.read_text())["kernels"]
    assert all(not row["breaks"] and row["registers"] <= 255 for row in stored)
    assert not any(row["stack_bytes"] for row in stored if row["arch"] == "sm_90")
    assert {(row["kernel"], row["arch"]) for row in fresh} == {(row["kernel"], row["arch"]) for row in stored}
    assert {row["arch"] for row in fresh} == {"sm_80", "sm_90"}
