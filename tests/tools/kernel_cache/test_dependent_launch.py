"""Kernels that are launched while the one before runs wait for it before they touch memory, in PTX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvtest.lanes import some

SCRIPT = Path(__file__).with_name("first_access.py")
OPS = {
    "decoder_ops": {"_add_norm_kernel", "_rotate_kernel", "_silu_product_kernel"},
    "dense_decode": {"_append_rows_kernel", "_dense_decode_kernel"},
    "hsa": {"_gather_attend_kernel", "_score_pages_kernel", "_score_rows_kernel", "_select_tokens_kernel"},
    "kivi": {"_append_rows_kernel", "_kivi_decode_kernel"},
    "trizone": {"_prologue_kernel", "_trizone_kernel"},
}
"""The ops of a decode step, and those of their kernels that are launched dependently at least."""


def compiled(architecture: str, *ops: str, cache: Path) -> list[dict[str, Any]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), architecture, *ops],
        capture_output=True, text=True, timeout=280, check=False,
        env={**environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


@pytest.mark.timeout(300)
@pytest.mark.parametrize("op", some(OPS, "hsa"))
def test_a_dependent_kernel_waits_first_and_no_other_waits(op: str, tmp_path: Path) -> None:
    rows = compiled("sm_90", op, cache=tmp_path)
    dependent = [row for row in rows if row["launch_pdl"]]
    assert {row["kernel"] for row in dependent} >= OPS[op]
    for row in dependent:
        wait, allow, access = row["first"]
        assert (wait, allow) == ("griddepcontrol.wait", "griddepcontrol.launch_dependents"), row
        assert access.startswith("ld.global"), row
        assert row["waits"] == 1, row
    for row in rows:
        assert row["launch_pdl"] or row["waits"] == 0, row


@pytest.mark.full
@pytest.mark.timeout(300)
def test_an_older_gpu_has_none(tmp_path: Path) -> None:
    rows = compiled("sm_89", "decoder_ops", cache=tmp_path)
    assert {row["kernel"] for row in rows} >= OPS["decoder_ops"]
    assert not any(row["launch_pdl"] or row["waits"] for row in rows)
