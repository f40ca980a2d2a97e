"""The committed dashboards: what the generator writes, well formed, of metrics that the services have."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml

from kvferry.shared.kernel_paths import KernelQuarantine
from kvferry.shared.metrics import CERTIFICATE_EXPIRY, DecodeMetrics, PrefillMetrics, RouterMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
MACROS = {"$__rate_interval": "1m", "$model": ".*"}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = DEPLOY / "grafana" / "generate.py"
    spec = importlib.util.spec_from_file_location("kvferry_dashboards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def expressions() -> list[tuple[str, str]]:
    """Every query of every panel, with where it stands."""
    return [
        (f"{path.stem}: {panel['title']}", target["expr"])
        for path in DASHBOARDS
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for path in RULES
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def known_series() -> set[str]:
    """Names of the samples that the services have or the rules record."""
    names = {rule["record"] for rule in rules() if "record" in rule}
    for metrics in (RouterMetrics(), PrefillMetrics(), DecodeMetrics()):
        for family in metrics.registry.collect():
            suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
            names |= {family.name + suffix for suffix in suffixes[family.type]}
    names |= {family.name for family in KernelQuarantine("decode").collect()} | {CERTIFICATE_EXPIRY}
    return names


def test_committed_dashboards_are_what_the_generator_writes(generator: ModuleType) -> None:
    written = {f"{dashboard.uid}.json": generator.render(dashboard) for dashboard in generator.DASHBOARDS}
    committed = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS}
    assert committed == written


def test_every_query_is_valid_promql() -> None:
    for place, expression in expressions():
        for macro, value in MACROS.items():
            expression = expression.replace(macro, value)
        assert "$" not in expression, place
        promql_parser.parse(expression)


def test_every_series_in_panels_and_rules_exists() -> None:
    known = known_series()
    places = [
        *expressions(),
        *((str(rule.get("record", rule.get("alert"))), rule["expr"]) for rule in rules()),
    ]
    unknown = {
        (place, name)
        for place, expression in places
        for name in re.findall(r"(?:[a-z]+:)?kvferry[_:][\w:]+", expression)
        if name not in known
    }
    assert unknown == set()


def test_panels_have_their_place_and_an_id_of_their_own() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = [
            (x, y)
            for panel in panels
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(set(cells)) == len(cells), path.stem
        assert max(x for x, _ in cells) < 24


def test_dashboards_use_the_datasource_that_is_provisioned() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text(encoding="utf-8"))
    (source,) = sources["datasources"]
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for holder in (panel, *panel["targets"]):
                assert holder["datasource"] == {"type": source["type"], "uid": source["uid"]}
