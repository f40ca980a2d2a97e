"""The lanes of the tests: what a covering set covers, what runs in which lane, and what is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kvtest import lanes
from kvtest.lanes import covering

HELPERS = Path(lanes.__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.covering(1)
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", [0, 1, 2])
def test_each_value(a, b): ...

@pytest.mark.covering(2)
@pytest.mark.parametrize(("a", "same"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("c", [0, 1])
def test_each_pair(a, same, b, c): ...

@pytest.mark.full
def test_whole(): ...

@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.full)])
def test_some(n):
    if n:
        pytest.skip("no reason")
"""


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), strength=st.integers(1, 2), data=st.data())
def test_a_covering_set_has_whatever_any_combination_has(
    sizes: list[int], strength: int, data: st.DataObject
) -> None:
    every = list(product(*map(range, sizes)))
    given_ = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))

    def parts(chosen: list[tuple[int, ...]]) -> set[object]:
        length = min(strength, len(sizes))
        return {part for values in chosen for part in combinations(enumerate(values), length)}

    taken = covering(given_, strength)
    assert parts([given_[number] for number in taken]) == parts(given_)
    assert covering(given_, strength) == taken


def test_a_covering_set_is_small() -> None:
    assert len(covering(list(product(range(5), range(5))), 1)) == 5
    assert len(covering(list(product(range(3), range(3), range(3))), 2)) <= 12
    assert len(covering(list(product(range(3), range(3))), 2)) == 9


def reported(folder: Path, *options: str) -> dict[str, Any]:
    """What a run of the tests in a folder reports."""
    command = [sys.executable, "-m", "pytest", "-q", "--report", "report.json", *options]
    subprocess.run(command, cwd=folder, check=True, timeout=120, capture_output=True)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_a_lane_runs_its_tests_and_a_report_counts_them(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ("kvtest.lanes", "kvtest.report")\n')
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\npythonpath = {HELPERS}\n")
    passed = {"fast": 3 + 4 + 1, "all": 9 + 8 + 2}
    for lane, options in (("fast", ("-n", "1")), ("all", ("--all",))):
        report = reported(tmp_path, *options)
        assert report["lane"] == lane
        assert report["counts"]["passed"] == passed[lane]
        assert report["counts"]["failed"] == 0
        assert report["skips"] == ({"no reason": 1} if lane == "all" else {})
        assert report["seconds"] >= 0
        assert len(report["slowest"]) == min(20, passed[lane] + len(report["skips"]))
