"""`kvtest.fast_interpreter` changes how long Triton's interpreter takes, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

SCRIPT = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton
import triton.language as tl
from kvtest import fast_interpreter


@triton.jit
def add_one(values):
    return values + 1


@triton.jit
def kernel(source, target, sums, SIZE: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, SIZE)
    values = tl.load(source + row * SIZE + ids, mask=ids < SIZE - 1, other=0.0)
    square = tl.reshape(add_one(values), (4, SIZE // 4))
    product = tl.dot(square, tl.trans(square))
    tl.store(sums + row * 4 + tl.arange(0, 4), tl.max(product, axis=1) + tl.sum(product, axis=0))
    ranked = tl.sort(tl.cumsum(values, axis=0)).to(tl.float16).to(tl.int32)
    tl.store(target + row * SIZE + ids, tl.where(ids % 3 == 0, ranked, tl.argmax(values, axis=0)))


def run():
    source = torch.rand(3, 64, generator=torch.Generator().manual_seed(1)) * 9 - 3
    target, sums = torch.zeros(3, 64, dtype=torch.int32), torch.zeros(3, 4)
    kernel[(3,)](source, target, sums, SIZE=64)
    return target, sums


def refusal():
    try:
        kernel[(1,)](torch.zeros(48), torch.zeros(48, dtype=torch.int32), torch.zeros(4), SIZE=48)
    except Exception as error:
        return str(error)


plain, refused, language = run(), refusal(), dict(vars(tl))
fast_interpreter.install()
assert all(map(torch.equal, run(), plain)) and plain[1].all()
assert "power of 2" in refused and refusal() == refused
assert dict(vars(tl)) == language
"""


def test_results_errors_and_the_language_after_a_launch_are_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # Triton reads the kernel's source
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": ":".join(map(str, sys.path)), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
