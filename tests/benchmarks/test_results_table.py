"""Numbers in README and docs are those of the result files; the command that makes them works in small."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.services.launcher import cli
from kvferry.shared.process.command_line import option_name
from kvferry.tools.evaluation.calibration_config import CalibrateConfig

ROOT = Path(__file__).parents[2]
PAGES = "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
)
SMALL = (
    *("--methods", "full,snapkv,rocketkv", "--budgets", "25%,2.5%", "--tasks", "single_needle,third_turn"),
    *("--lengths", "256", "--examples", "1", "--threads", "1", "--max-new-tokens", "6"),
)


def table_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "results_table.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def commands(name: str) -> list[list[str]]:
    """The commands of this name in README and docs, their options as words."""
    joined = PAGES.replace("\\\n", " ")
    return [
        shlex.split(line) for line in re.findall(rf"^\.venv/bin/kvferry {name} (.*)$", joined, re.MULTILINE)
    ]


def test_numbers_of_readme_and_docs_are_those_of_the_result_files() -> None:
    done = table_of("--check")
    assert done.returncode == 0, done.stderr
    sections = re.findall(r"<!-- results of ([^>]+?) -->", PAGES)
    assert len(sections) == 3
    for name in (word for section in sections for word in section.split() if "=" not in word):
        result = json.loads((ROOT / name).read_text(encoding="utf-8"))
        assert result["commits"]
        assert result["command"].startswith("kvferry eval ")
    for name in re.findall(r"<!-- value (\S+) ", PAGES):
        assert json.loads((ROOT / name).read_text(encoding="utf-8"))["command"][0].startswith("benchmarks/")


def test_values_are_copied_in_their_format_and_stale_ones_are_found(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text(json.dumps({"plans": {"a:1": {"share": 0.1634}}, "tokens": 4096}))
    page = tmp_path / "page.md"
    page.write_text(
        "took <!-- value figures.json tokens ,d -->1<!-- /value --> and "
        "<!-- value figures.json plans/a:1/share .2f -->2<!-- /value -->.\n"
    )
    arguments = ("--root", str(tmp_path), str(page))
    done = table_of(*arguments, "--check")
    assert done.returncode == 1
    assert "page.md: numbers are not those" in done.stderr
    assert table_of(*arguments).returncode == 0
    assert re.sub("<!--.*?-->", "", page.read_text()) == "took 4,096 and 0.16.\n"
    assert table_of(*arguments, "--check").returncode == 0


def test_a_table_may_be_of_some_methods_and_settings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    name = "benchmarks/results/eval/readme/results.json"
    page.write_text(
        f"<!-- results of {name} methods=full,snapkv settings=aware -->\n<!-- end of results -->\n"
    )
    assert table_of(str(page)).returncode == 0
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == ["full", "snapkv"]
    assert "Query-aware" in text
    assert "Query-agnostic" not in text


def test_the_documented_commands_are_those_that_made_the_tables() -> None:
    of_tables = re.findall(r"benchmarks/results/eval/\S+/results.json", PAGES.partition("# Benchmarks")[2])
    made = [json.loads((ROOT / name).read_text(encoding="utf-8"))["command"] for name in of_tables]
    assert [shlex.join(["kvferry", "eval", *options]) for options in commands("eval")] == made


def test_the_documented_command_makes_its_table_in_small(tmp_path: Path) -> None:
    options = commands("eval")[0]
    assert "aware,agnostic" in options
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", *[o for o in options if o != "--plots"], *SMALL, "--out", str(tmp_path / "out")])
    assert end.value.code == 0
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results of out/results.json -->\n<!-- end of results -->\nafter\n")
    assert table_of("--root", str(tmp_path), str(readme), "--check").returncode == 1
    assert table_of("--root", str(tmp_path), str(readme)).returncode == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of results -->\nafter\n")
    for setting in ("Query-aware", "Query-agnostic"):
        table = text.partition(f"**{setting}")[2]
        assert "Exact match in % at 25 / 2.5 % of the full KV's bytes (bytes kept), n = 1 a cell,\n" in table
        assert "| method | single needle | third turn, 8 facts | bytes read, % |" in table
        assert re.search(r"^\| `full` \| \d+ \| \d+ \| 100 \|$", table, re.MULTILINE)
        row = r"^\| `snapkv` \| \d+ / \d+ \| \d+ / \d+ \| 2[45] / [12]\.\d \|$"
        assert re.search(row, table, re.MULTILINE)
        assert re.search(r"^\| `rocketkv` \| \d+ / n/a \| .* \| \d\.\d / n/a \|$", table, re.MULTILINE)
    assert table_of("--root", str(tmp_path), str(readme), "--check").returncode == 0


def test_calibration_commands_of_the_readme_have_the_options_they_name() -> None:
    found = commands("calibrate")
    assert found
    for options in found:
        known = {option_name(field) for field in CalibrateConfig.model_fields}
        assert {word for word in options if word.startswith("--")} <= known


def test_a_readme_without_its_place_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    done = table_of("--root", str(tmp_path), str(readme))
    assert done.returncode == 1
    assert "no place for results" in done.stderr
