"""A cache that Triton cannot write, or load from, ends a worker's start with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvferry.kernels import dispatch
from kvferry.shared.device.kernel_paths import cache_folder, choose_kernels
from kvferry.shared.errors import ConfigurationError

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a worker that compiles kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "compiles", lambda device: True)
    return tmp_path / "cache"


def test_a_worker_starts_with_a_cache_that_it_can_use(cache: Path) -> None:
    choose_kernels("auto", CPU)
    assert list(cache.iterdir()) == []


def test_a_worker_does_not_start_with_a_cache_that_it_cannot_write(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ConfigurationError, match=r"cache cannot be written: File exists; set TRITON_"):
        choose_kernels("auto", CPU)


def test_a_worker_does_not_start_with_a_cache_that_it_cannot_load_from(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = os.statvfs(cache.parent).f_flag | os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    with pytest.raises(ConfigurationError, match=r"is on a file system with noexec; .* --kernels torch"):
        choose_kernels("auto", CPU)


def test_a_worker_that_compiles_nothing_needs_no_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cache.write_text("a file")
    choose_kernels("auto", CPU)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("noexec", "is on a file system with noexec"),
        ("ro", "cannot be written: Read-only file system"),
        ("rw", None),
    ],
)
def test_a_mounted_file_system_is_known_by_its_options(
    tmp_path: Path, option: str, problem: str | None
) -> None:
    script = (
        "from pathlib import Path; import sys; from kvferry.shared.device.kernel_paths import cache_problem; "
    )
    script += "print(cache_problem(Path(sys.argv[1])))"
    mount = 'mount -t tmpfs -o "$1" none "$2" && exec "$3" -c "$4" "$2"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", option, str(tmp_path), sys.executable, script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()[-200:]}")
    assert done.stdout.strip() == (f"{tmp_path} {problem}" if problem else "None")


def test_the_folder_is_triton_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
