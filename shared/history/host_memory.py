"""How much host memory this process may still take, from which a worker chooses the size of its history."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return what the system has available, or what is left of the limit of a control group (a container's),
    if that is less. Without /proc, half of the physical memory.

    Args: root: of the file system; for tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min([available, *_group_bytes(root)]))


def _group_bytes(root: Path) -> Iterator[int]:
    """Yield what is left of each limit that applies, with the page cache that can be reclaimed."""
    mounted = root / "sys/fs/cgroup"
    v1 = mounted / "memory"
    folders = [(v1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")]
    path = Path("/")
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, name = line.partition("::")
        path = Path(name) if number == "0" else path
    for group in (path, *path.parents):
        folders.append((mounted / str(group).lstrip("/"), "memory.max", "memory.current", "inactive_file"))
    for folder, limit, usage, reclaimable in folders:
        limit_text, usage_text = _text(folder / limit).strip(), _text(folder / usage).strip()
        if limit_text.isdigit() and usage_text.isdigit():
            cached = [line.split() for line in _text(folder / "memory.stat").splitlines()]
            freed = sum(int(fields[1]) for fields in cached if fields[0] == reclaimable)
            yield int(limit_text) - int(usage_text) + freed


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
