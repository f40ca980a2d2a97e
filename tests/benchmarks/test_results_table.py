"""README's accuracy tables are what its result files say, and the command that makes them works in small."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.services.launcher import cli
from kvferry.shared.command_line import option_name
from kvferry.tools.evaluation.calibration_config import CalibrateEpsilonConfig, CalibrateQualityConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = (
    *("--methods", "full,snapkv,rocketkv", "--budgets", "25%,2.5%", "--tasks", "single_needle,third_turn"),
    *("--lengths", "256", "--examples", "1", "--threads", "1", "--max-new-tokens", "6"),
)


def table_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "results_table.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def commands(name: str) -> list[list[str]]:
    """The README's commands of this name, their options as words."""
    joined = README.replace("\\\n", " ")
    return [
        shlex.split(line) for line in re.findall(rf"^\.venv/bin/kvferry {name} (.*)$", joined, re.MULTILINE)
    ]


def test_the_readmes_tables_are_those_of_its_result_files() -> None:
    done = table_of("--check")
    assert done.returncode == 0, done.stderr
    (files,) = re.findall(r"<!-- results of ([^>]+?) -->", README)
    for name in files.split():
        result = json.loads((ROOT / name).read_text(encoding="utf-8"))
        assert result["commits"]
        assert result["command"].startswith("kvferry eval ")


def test_the_readmes_command_makes_its_table_in_small(tmp_path: Path) -> None:
    (options,) = commands("eval")
    assert options[options.index("--budgets") :][:2] == ["--budgets", "50%,25%,10%,5%,2.5%"]
    assert "aware,agnostic" in options
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", *[o for o in options if o != "--plots"], *SMALL, "--out", str(tmp_path / "out")])
    assert end.value.code == 0
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results of out/results.json -->\n<!-- end of results -->\nafter\n")
    assert table_of("--readme", str(readme), "--check").returncode == 1
    assert table_of("--readme", str(readme)).returncode == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of results -->\nafter\n")
    for setting in ("Query-aware", "Query-agnostic"):
        table = text.partition(f"**{setting}")[2]
        assert "Exact match in % at 25 / 2.5 % of the full KV's bytes (bytes kept), n = 1 a cell" in table
        assert "| method | single needle | third turn, 8 facts |" in table
        assert re.search(r"^\| `full` \| \d+ \| \d+ \|$", table, re.MULTILINE)
        assert re.search(r"^\| `snapkv` \| \d+ / \d+ \| \d+ / \d+ \|$", table, re.MULTILINE)
        assert re.search(r"^\| `rocketkv` \| \d+ / n/a \| ", table, re.MULTILINE)
    assert table_of("--readme", str(readme), "--check").returncode == 0


def test_calibration_commands_of_the_readme_have_the_options_they_name() -> None:
    found = commands("calibrate")
    assert {kind for kind, *_ in found} == {"epsilon", "quality"}
    for kind, *options in found:
        config = {"epsilon": CalibrateEpsilonConfig, "quality": CalibrateQualityConfig}[kind]
        known = {option_name(field) for field in config.model_fields}
        assert {word for word in options if word.startswith("--")} <= known


def test_a_readme_without_its_place_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    done = table_of("--readme", str(readme))
    assert done.returncode == 1
    assert "it must have one" in done.stderr
