"""What tests of methods from other packages share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.shared.compression import interface


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """`install(source, lines)`: a distribution of one module with these lines in its entry-point group, until
    the test's end."""
    caches = (interface.installed_methods, interface.installed_parts)

    def clear() -> None:
        for cached in caches:
            cached.cache_clear()

    def write(source: str, lines: str) -> None:
        (tmp_path / "outside_kvferry_methods.py").write_text(source)
        info = tmp_path / "outside_kvferry_methods-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-kvferry-methods\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvferry.methods]\n{lines}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "outside_kvferry_methods", raising=False)
        clear()

    yield write
    monkeypatch.undo()
    sys.modules.pop("outside_kvferry_methods", None)
    clear()
