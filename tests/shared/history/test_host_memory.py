"""The memory that a worker may take: of the system, of its control group, whichever has less."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.shared.history.host_memory import available_memory_bytes

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", "MemTotal: 99999 kB\nMemAvailable:    8192 kB\nSwapFree: 1 kB\n")
    return tmp_path


def test_without_a_limit_it_is_what_the_system_has_available(root: Path) -> None:
    assert available_memory_bytes(root) == 8 * MIB
    write(root / "proc/self/cgroup", "0::/\n")
    write(root / "sys/fs/cgroup/memory.max", "max\n")
    write(root / "sys/fs/cgroup/memory.current", f"{MIB}\n")
    assert available_memory_bytes(root) == 8 * MIB


@pytest.mark.parametrize("group", ["/", "/a/b", "/a"])
def test_a_groups_limit_holds_for_it_and_those_below(root: Path, group: str) -> None:
    write(root / "proc/self/cgroup", "0::/a/b\n")
    folder = root / "sys/fs/cgroup" / group.lstrip("/")
    write(folder / "memory.max", f"{6 * MIB}\n")
    write(folder / "memory.current", f"{5 * MIB}\n")
    assert available_memory_bytes(root) == MIB
    # Page cache can be reclaimed.
    write(folder / "memory.stat", f"anon 1\ninactive_file {2 * MIB}\n")
    assert available_memory_bytes(root) == 3 * MIB


def test_a_limit_of_the_first_version_holds(root: Path) -> None:
    folder = root / "sys/fs/cgroup/memory"
    write(root / "proc/self/cgroup", "4:memory:/docker/1\n")
    write(folder / "memory.limit_in_bytes", f"{4 * MIB}\n")
    write(folder / "memory.usage_in_bytes", f"{MIB}\n")
    write(folder / "memory.stat", f"total_inactive_file {MIB}\n")
    assert available_memory_bytes(root) == 4 * MIB
    write(folder / "memory.usage_in_bytes", f"{9 * MIB}\n")
    assert available_memory_bytes(root) == 0


def test_this_machine_has_some() -> None:
    assert available_memory_bytes() > 0


def test_a_system_without_proc_has_half_of_its_memory(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) > 0
