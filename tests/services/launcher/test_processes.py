"""How the processors of the machine are divided, and how services' processes are made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.services.launcher import process
from kvferry.services.launcher.process import process_context
from kvferry.services.launcher.processes import divide_threads


@pytest.mark.parametrize(("num_cpus", "expected"), [(1, (1, 1)), (2, (2, 1)), (4, (4, 1)), (16, (16, 5))])
def test_prefill_may_use_every_processor_and_decode_a_third(num_cpus: int, expected: tuple[int, int]) -> None:
    assert divide_threads(0, num_cpus) == expected


def test_a_request_holds_for_each() -> None:
    assert divide_threads(3, 2) == (3, 3)


def test_the_processors_of_this_machine_count_if_none_are_given() -> None:
    assert min(divide_threads(0)) >= 1


@pytest.mark.parametrize(
    ("device", "has_gpu", "expected"),
    [
        ("auto", False, "forkserver"),
        ("cpu", True, "forkserver"),
        ("auto", True, "spawn"),
        ("cuda", True, "spawn"),
    ],
)
def test_services_are_forked_where_no_gpu_is_used(
    device: str, has_gpu: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sys.platform.startswith("linux"):
        expected = "spawn"
    monkeypatch.setattr(process, "_NVIDIA", (tmp_path if has_gpu else tmp_path / "none",))
    assert process_context(device).get_start_method() == expected


def test_what_services_share_starts_no_thread_and_looks_for_no_device() -> None:
    script = (
        "import importlib, os, sys\n"
        "from kvferry.services.launcher.process import SHARED_IMPORTS, process_context\n"
        "process_context('cpu')\n"
        "list(map(importlib.import_module, SHARED_IMPORTS))\n"
        "import torch, grpc\n"
        "assert not sys.platform.startswith('linux') or os.listdir('/proc/self/task') == [str(os.getpid())]\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert {'transformers', 'zmq', 'uvicorn'} <= sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
