"""The walk of a chat request stays within the bounds that benchmarks/walk.py states."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from kvtest.benchmarks import run_benchmark

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "walk.py"
_spec = importlib.util.spec_from_file_location("walk", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
walk = importlib.util.module_from_spec(_spec)
sys.modules["walk"] = walk
_spec.loader.exec_module(walk)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("walk") / "walk.json"
    printed = run_benchmark("walk.py", "--requests", "8", "--output", output)
    found: dict[str, Any] = json.loads(output.read_text())
    for method, counted in found["methods"].items():
        assert f"{method}: {counted['files']} files, {counted['calls']} calls" in printed
    return found


@pytest.mark.parametrize("method", sorted(walk.BOUNDS))
def test_the_walk_is_no_longer_than_its_bound(figures: dict[str, Any], method: str) -> None:
    counted, bound = figures["methods"][method], walk.BOUNDS[method]
    assert counted["files"] <= bound.files, list(counted["by_file"])
    assert counted["calls"] <= bound.calls, list(counted["by_function"].items())[:20]


def test_folders_files_and_functions_add_up_to_the_same_calls(figures: dict[str, Any]) -> None:
    for counted in figures["methods"].values():
        by_folder = counted["by_folder"].values()
        assert sum(part["files"] for part in by_folder) == counted["files"] == len(counted["by_file"])
        sums = {
            sum(part["calls"] for part in by_folder),
            sum(counted["by_file"].values()),
            sum(counted["by_function"].values()),
        }
        assert sums == {counted["calls"]}
        assert {folder.partition("/")[0] for folder in counted["by_folder"]} <= {
            "kernels",
            "services",
            "shared",
        }


def test_a_call_is_a_function_entered_or_a_generator_resumed(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "part")
    file = tmp_path / "part" / "module.py"
    file.write_text("def numbers():\n    yield 1\n    yield 2\ndef called():\n    return list(numbers())\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(tmp_path / "link" / "module.py"), "exec"), names)
    counter = walk.CallCounter(tmp_path)
    before = sys.getprofile()
    try:
        counter.install()
        counter.start()
        names["called"]()
        found = counter.stop()
    finally:
        sys.setprofile(before)
        walk.threading.setprofile(None)
    ((_, called), (_, numbers)) = sorted((name, count) for (_, name), count in found.items())
    assert (called, numbers) == (1, 3)
    assert {path.partition("/")[2] for path, _ in found} == {"module.py"}
