"""Two checkouts run by turns, each with its own package and script; their numbers are compared by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"
MEASURE = """
import argparse, json
from pathlib import Path
from kvferry.shared.figures import VALUE
parser = argparse.ArgumentParser()
parser.add_argument("--times", type=int)
parser.add_argument("--output", type=Path)
options = parser.parse_args()
rates = {"a": [VALUE, 10 * VALUE, 3 * VALUE]}
result = {"command": ["x"], "rates": rates, "rows": [{"n": options.times}], "ok": True}
options.output.write_text(json.dumps(result))
"""


def checkout(folder: Path, value: float, *, links: bool) -> Path:
    """A repository of one module and one benchmark, of the older layout or with `src/kvferry`."""
    (folder / "shared").mkdir(parents=True)
    (folder / "shared" / "__init__.py").touch()
    (folder / "shared" / "figures.py").write_text(f"VALUE = {value}\n")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "measure.py").write_text(MEASURE)
    if links:
        (folder / "src" / "kvferry").mkdir(parents=True)
        (folder / "src" / "kvferry" / "__init__.py").touch()
        (folder / "src" / "kvferry" / "shared").symlink_to("../../shared")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.com"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "m"]):
        subprocess.run([*git, *command], cwd=folder, check=True, capture_output=True)
    return folder


def test_numbers_of_two_checkouts_are_compared_by_name(tmp_path: Path) -> None:
    before = checkout(tmp_path / "before", 2.0, links=False)
    after = checkout(tmp_path / "after", 3.0, links=True)
    output = tmp_path / "compared.json"
    command = [sys.executable, str(SCRIPT), "--before", str(before), "--after", str(after), "--repeats", "2"]
    done = subprocess.run(
        [*command, "--output", str(output), "measure.py", "--times", "7"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["rates/a: 6 -> 9 (1.500)", "rows/0/n: 7 -> 7 (1.000)"]
    result = json.loads(output.read_text())
    runs = result["numbers"]["rates/a"].pop("runs")
    assert runs == {"before": [6, 6], "after": [9, 9]}
    assert result["numbers"]["rates/a"] == pytest.approx({"before": 6, "after": 9, "after_over_before": 1.5})
    assert len(set(result["commits"].values())) == 2
