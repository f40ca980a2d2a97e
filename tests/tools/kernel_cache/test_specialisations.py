"""Requests of any length, budget and option find every kernel that they need compiled by the warm-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from kvtest import specialisations

from kvferry.kernels.hsa import MAX_PAGES
from kvferry.kernels.hsa.batch import SparseSize


@pytest.mark.timeout(600)
def test_no_request_launches_a_kernel_that_the_warm_up_has_not() -> None:
    """Keys are Triton's own, of a process that would compile."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, specialisations.__file__], capture_output=True, text=True, timeout=500, check=False,
        env={**environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["later"] == {}
    assert result["warm"] > 40
    assert result["without_warm_up"] > 10, "the requests need kernels"


def test_sizes_of_hybrid_sparse_attention_grow_to_the_model_s_and_the_kernel_s_limits() -> None:
    sizes = SparseSize.every_kernel(128, 4096)
    assert [size.max_pages for size in sizes if size.pages_of_one] == [128, 256, 512, 1024, 2048, 4096]
    assert [size.max_channels for size in sizes if size.larger_pages] == [16, 32, 64, 128]
    assert max(size.max_pages for size in SparseSize.every_kernel(8, 1 << 20)) == MAX_PAGES
    assert [size.max_pages for size in SparseSize.every_kernel(8, 5) if size.pages_of_one] == [128]
