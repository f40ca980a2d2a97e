"""The product stays as small as it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("services", "shared", "kernels", "baselines")
MAX_FILE_LINES, MAX_LINES = 450, 58_700


@pytest.fixture(scope="module")
def lines() -> dict[str, int]:
    """The number of lines of each file of the product."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 300
    return {str(path.relative_to(ROOT)): path.read_bytes().count(b"\n") for path in paths}


def test_no_file_is_too_long_to_be_read_at_once(lines: dict[str, int]) -> None:
    assert {name: number for name, number in lines.items() if number > MAX_FILE_LINES} == {}


def test_the_product_does_not_grow_unseen(lines: dict[str, int]) -> None:
    assert sum(lines.values()) <= MAX_LINES, "delete before you build, or say in the commit why it grew"
