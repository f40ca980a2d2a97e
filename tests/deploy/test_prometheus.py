"""Scrape configuration and rules: valid for the real tool, and every rule proven by a unit test."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed; on Debian: apt install prometheus"
)


def promtool(*arguments: str | Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for path in sorted((FOLDER / "rules").glob("*.yml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def unit_tests() -> list[dict[str, Any]]:
    return [
        test
        for path in sorted((FOLDER / "tests").glob("*.yml"))
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
    ]


def test_configuration_and_rules_are_valid() -> None:
    # The credentials that it names are made on first start, so their file is not looked for.
    promtool("check", "config", "--syntax-only", FOLDER / "prometheus.yml")
    assert "FAILED" not in promtool("check", "rules", *sorted((FOLDER / "rules").glob("*.yml")))


def test_every_alert_has_a_section_of_the_runbook_and_names_it() -> None:
    text = (FOLDER.parents[1] / "docs" / "runbook.md").read_text(encoding="utf-8")
    alerts = {rule["alert"]: rule["annotations"]["runbook"] for rule in rules() if "alert" in rule}
    assert alerts == {name: f"docs/runbook.md#{name.lower()}" for name in alerts}
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [*alerts]


def test_unit_tests_of_the_rules_pass() -> None:
    promtool("test", "rules", *sorted((FOLDER / "tests").glob("*.yml")))


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    checks = [check for test in unit_tests() for check in test.get("alert_rule_test", [])]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts == {check["alertname"] for check in checks if check["exp_alerts"]}
    assert alerts == {check["alertname"] for check in checks if not check["exp_alerts"]}


def test_every_recorded_series_has_a_test_with_its_value() -> None:
    checks = [check for test in unit_tests() for check in test.get("promql_expr_test", [])]
    records = {rule["record"] for rule in rules() if "record" in rule}
    assert records == {check["expr"] for check in checks if check["exp_samples"]}


def test_every_alert_has_a_severity_a_summary_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
            assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
