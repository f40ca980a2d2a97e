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

from kvferry.shared.device.kernel_paths import KernelQuarantine
from kvferry.shared.telemetry.metrics import CERTIFICATE_EXPIRY, DecodeMetrics, PrefillMetrics, RouterMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
MACROS = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*", "$method": ".*"}


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
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
        chosen = variables["datasource"]
        assert (chosen["query"], chosen["current"]["value"]) == (source["type"], source["uid"])
        asked = [variable for variable in variables.values() if variable["type"] == "query"]
        for panel in dashboard["panels"]:
            for holder in (panel, *panel["targets"], *asked):
                assert holder["datasource"] == {"type": source["type"], "uid": "${datasource}"}


def test_variables_choose_instances_and_methods(generator: ModuleType) -> None:
    of_methods = {
        name.removesuffix("_total")
        for metrics in (RouterMetrics(), PrefillMetrics(), DecodeMetrics())
        for family in vars(metrics).values()
        if "method" in getattr(family, "_labelnames", ())
        for name in [family._name.removeprefix("kvferry_")]
    }
    assert of_methods == generator.OF_METHODS
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        names = [variable["name"] for variable in dashboard["templating"]["list"]]
        used = ["model", "instance", *(["method"] if path.stem != "sessions" else [])]
        assert names == ["datasource", *used]
        for name in used:
            assert f"${name}" in json.dumps(dashboard["panels"]), (path.stem, name)
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                series = re.findall(r"kvferry_\w+", target["expr"])
                if series and ":kvferry" not in target["expr"]:
                    assert target["expr"].count("$instance") == len(series), target["expr"]


def test_latencies_have_heat_maps_thresholds_and_tables(generator: ModuleType) -> None:
    panels = [
        panel for path in DASHBOARDS for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
    ]
    for panel in panels:
        is_heat_map = panel["type"] == "heatmap"
        assert ("_bucket" in panel["targets"][0]["expr"] and "le" in panel["targets"][0]["legendFormat"]) == (
            is_heat_map
        ), panel["title"]
        assert [query["format"] for query in panel["targets"] if query["format"] == "heatmap"] == (
            ["heatmap"] if is_heat_map else []
        )
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    shown = " ".join(panel["targets"][0]["expr"] for panel in panels if panel["type"] == "heatmap")
    for family in (
        "time_to_first_token",
        "inter_token_latency",
        "e2e_request_latency",
        "transfer",
        "prefill",
    ):
        assert f"kvferry_{family}_seconds_bucket" in shown
    bounds = {float(bound) for path in RULES for bound in re.findall(r'le="([\d.]+)"', path.read_text())}
    assert bounds == {generator.FIRST_TOKEN_S, generator.NEXT_TOKEN_S}
    marked = {
        panel["title"]: steps[1]["value"]
        for panel in panels
        if len(steps := panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1
    }
    assert marked["Time to first token"] == generator.FIRST_TOKEN_S
    assert marked["Inter-token latency"] == generator.NEXT_TOKEN_S
    tables = [panel for panel in panels if panel["type"] == "table"]
    assert {panel["title"] for panel in tables} == {"Methods", "Workers"}
    for panel in tables:
        by = panel["transformations"][0]["options"]["byField"]
        assert all(
            target["instant"] and f"by ({by}" in target["expr"].replace("le, ", "")
            for target in panel["targets"]
        )
