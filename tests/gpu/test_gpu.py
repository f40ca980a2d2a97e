"""On a CUDA device: kernels, graphs and tokens, through the benchmark's own code.

In processes of their own, because this one has told Triton to interpret. Times are not looked at. The rows
are held to the same without a GPU, in small (`tests/benchmarks/test_gpu.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest.gpu_rows import check_kernels, check_tokens

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(900),
]


def run(tmp_path: Path, part: str) -> dict[str, Any]:
    output = tmp_path / "result.json"
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu", "--parts", part, "--limit-s", "800", "--output", str(output)],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def test_the_demo_models_tokens_are_the_cpus_or_part_at_a_tie(tmp_path: Path) -> None:
    check_tokens(run(tmp_path, "tokens")["tokens"])


def test_every_kernel_agrees_with_its_reference(tmp_path: Path) -> None:
    check_kernels(run(tmp_path, "kernels")["kernels"])
