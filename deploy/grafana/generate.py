"""Writes the Grafana dashboards: `python deploy/grafana/generate.py`.

A dashboard is a list of panels and a panel a list of queries. The JSON files are committed; a test compares
them with what this script writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
HEIGHT = 8

Kind = Literal["timeseries", "stat", "heatmap", "table"]

FIRST_TOKEN_S, NEXT_TOKEN_S = 2.0, 0.1
"""The objectives' bounds, as in the recording rules."""
OF_METHODS = frozenset(
    (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "generation_tokens", "prefill_seconds", "compress_seconds", "pack_seconds", "transfer_seconds",
        "kv_full_bytes", "kv_transfer_bytes", "kv_delta_saved_bytes", "kv_resent_bytes",
        "kv_compression_ratio", "decode_tokens",
    )
)  # fmt: skip
"""Families with a label `method`."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A PromQL expression and the legend of its series. In a table: a column's name and unit."""

    expr: str
    legend: str = "__auto"
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        unit: Grafana's name for it; width: in columns, 24 to a row.
        bad: values from here on are shown as bad; below_is_bad: values below it are.
        by: of a table, the label with a row for each value.
    """

    title: str
    queries: tuple[Query, ...]
    unit: str
    about: str = ""
    kind: Kind = "timeseries"
    width: int = 12
    stacked: bool = False
    bad: float | None = None
    below_is_bad: bool = False
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One dashboard, in a file that is named after `uid`."""

    uid: str
    title: str
    panels: tuple[Panel, ...] = field(default=())


# ---- parts of expressions --------------------------------------------------------------------------------

RATE = "[$__rate_interval]"
MODEL = 'model=~"$model"'
INSTANCE = 'instance=~"$instance"'
METHOD = 'method=~"$method"'


def selected(family: str, where: str = MODEL) -> str:
    """A family's series of the chosen instances and, where it has them, methods. `where`: further ones."""
    plain = family
    for suffix in ("_total", "_sum", "_count", "_bucket"):
        plain = plain.removesuffix(suffix)
    labels = filter(None, (where, METHOD if plain in OF_METHODS else "", INSTANCE))
    return f"kvferry_{family}{{{', '.join(labels)}}}"


def rate(family: str, by: str = "", *, where: str = MODEL) -> str:
    """A counter's rate, summed over all labels but `by`."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({selected(family, where)}{RATE}))"


def quantile(share: float, family: str, *, by: str = "", where: str = MODEL) -> str:
    buckets = rate(f"{family}_bucket", ", ".join(filter(None, ("le", by))), where=where)
    return f"histogram_quantile({share:g}, {buckets})"


def heat_map(title: str, family: str, *, unit: str = "s", where: str = MODEL, width: int = 12) -> Panel:
    """How many of a histogram's values came in each bucket, over time."""
    expr = f"sum by (le) (increase({selected(f'{family}_bucket', where)}{RATE}))"
    query = Query(expr=expr, legend="{{le}}")
    return Panel(title=title, kind="heatmap", unit=unit, width=width, queries=(query,))


def quantiles(family: str, name: str = "", *shares: float) -> tuple[Query, ...]:
    """Percentiles of a histogram over all methods; by default the median, 95th and 99th."""
    return tuple(
        Query(expr=quantile(share, family), legend=f"{name} p{share * 100:g}".strip())
        for share in shares or (0.5, 0.95, 0.99)
    )


def mean(family: str, name: str, by: str = "model") -> Query:
    return Query(expr=f"{rate(f'{family}_sum', by)} / {rate(f'{family}_count', by)}", legend=name)


def or_zero(expr: str) -> str:
    """For counters whose series appear with the first event: before it the value is zero, not missing."""
    return f"{expr} or vector(0)"


# ---- dashboards ------------------------------------------------------------------------------------------

OVERVIEW = Dashboard(
    uid="overview",
    title="kvferry / Overview",
    panels=(
        Panel(title="Ready", kind="stat", width=4, unit="bool_yes_no", bad=1, below_is_bad=True,
              queries=(Query(expr=f"min({selected('ready', '')})"),)),
        Panel(title="Services up", kind="stat", width=4, unit="short",
              queries=(Query(expr='sum by (job) (up{job=~"router|prefill|decode"})', legend="{{job}}"),)),
        Panel(title="Alerts firing", kind="stat", width=4, unit="short", bad=1,
              queries=(Query(expr=or_zero('count(ALERTS{alertstate="firing"})')),)),
        Panel(title=f"First token within {FIRST_TOKEN_S:g} s", kind="stat", width=6, unit="percentunit",
              bad=0.95, below_is_bad=True,
              about="Objective: 95 %. Over the last hour.",
              queries=(Query(expr=f"1 - model:kvferry_time_to_first_token_slow:ratio_rate1h{{{MODEL}}}",
                             legend="{{model}}"),)),
        Panel(title=f"Next token within {1000 * NEXT_TOKEN_S:g} ms", kind="stat", width=6, unit="percentunit",
              bad=0.99, below_is_bad=True,
              about="Objective: 99 %. Over the last hour.",
              queries=(Query(expr=f"1 - model:kvferry_inter_token_latency_slow:ratio_rate1h{{{MODEL}}}",
                             legend="{{model}}"),)),
        Panel(title="Error budget burn rate", unit="none", bad=14.4,
              about="At 1 a month's budget lasts a month. Alerts page above 14.4 and open a ticket above 6.",
              queries=(
                  Query(expr=f"model:kvferry_time_to_first_token_slow:ratio_rate1h{{{MODEL}}} / 0.05",
                        legend="first token"),
                  Query(expr=f"model:kvferry_inter_token_latency_slow:ratio_rate1h{{{MODEL}}} / 0.01",
                        legend="next token"),
              )),
        Panel(title="Requests", unit="reqps", stacked=True, queries=(
            Query(expr=rate("request_success_total", "finish_reason"), legend="{{finish_reason}}"),
            Query(expr=or_zero(rate("request_failure_total", "category", where="")),
                  legend="failed: {{category}}"),
        )),
        Panel(title="Time to first token", unit="s", bad=FIRST_TOKEN_S,
              queries=quantiles("time_to_first_token_seconds")),
        heat_map("Time to first token, all requests", "time_to_first_token_seconds"),
        Panel(title="Request latency", unit="s", queries=quantiles("e2e_request_latency_seconds")),
        heat_map("Request latency, all requests", "e2e_request_latency_seconds"),
        Panel(title="Methods", kind="table", unit="short", width=24, by="method", queries=(
            Query(expr=rate("e2e_request_latency_seconds_count", "method"), legend="requests", unit="reqps"),
            Query(expr=rate("generation_tokens_total", "method"), legend="tokens a second"),
            Query(expr=quantile(0.95, "time_to_first_token_seconds", by="method"),
                  legend="first token, p95", unit="s"),
            Query(expr=quantile(0.95, "inter_token_latency_seconds", by="method"),
                  legend="next token, p95", unit="s"),
            Query(expr=f"{rate('kv_full_bytes_total', 'method')} / "
                       f"{rate('kv_transfer_bytes_total', 'method')}", legend="compression ratio"),
        )),
        Panel(title="Tokens", unit="short", about="Per second.", queries=(
            Query(expr=rate("prompt_tokens_total", "model"), legend="prompt"),
            Query(expr=rate("generation_tokens_total", "model"), legend="generated"),
        )),
        Panel(title="Turns resumed after losing a worker", unit="cps", queries=(
            Query(expr=or_zero(rate("recoveries_total", "role", where="")), legend="{{role}}"),)),
    ),
)  # fmt: skip

TRANSFER = Dashboard(
    uid="kv-transfer",
    title="kvferry / KV transfer",
    panels=(
        Panel(title="Full KV against shipped", unit="Bps", queries=(
            Query(expr=rate("kv_full_bytes_total", "method"), legend="full, {{method}}"),
            Query(expr=rate("kv_transfer_bytes_total", "method"), legend="shipped, {{method}}"),
        )),
        Panel(title="Compression ratio by method", unit="none", about="Bytes of full KV per byte shipped.",
              queries=(
                  Query(expr=f"{rate('kv_full_bytes_total', 'method')} / "
                             f"{rate('kv_transfer_bytes_total', 'method')}", legend="{{method}}"),
              )),
        Panel(title="Compression ratio of single prompts", unit="none",
              queries=quantiles("kv_compression_ratio", "", 0.1, 0.5, 0.9)),
        Panel(title="Shipped by kind", unit="Bps", stacked=True, queries=(
            Query(expr=rate("kv_transfer_bytes_total", "kind"), legend="{{kind}}"),)),
        Panel(title="Not shipped because decode had retained it", unit="Bps", stacked=True, queries=(
            Query(expr=or_zero(rate("kv_delta_saved_bytes_total", "method")), legend="{{method}}"),)),
        Panel(title="Sent again after a lost connection", unit="Bps", stacked=True, queries=(
            Query(expr=or_zero(rate("kv_resent_bytes_total", "method")), legend="{{method}}"),)),
        Panel(title="Transfer against compute, per prompt", unit="s",
              about="Blocks are sent while later layers are computed.", queries=(
                  mean("prefill_seconds", "prefill"),
                  mean("compress_seconds", "compress"),
                  mean("pack_seconds", "pack"),
                  mean("transfer_seconds", "transfer"),
              )),
        Panel(title="Transfer time", unit="s", queries=quantiles("transfer_seconds")),
        heat_map("Transfer time, all prompts", "transfer_seconds"),
        Panel(title="Prefill time", unit="s", queries=quantiles("prefill_seconds")),
        heat_map("Prefill time, all prompts", "prefill_seconds"),
        Panel(title="Waiting for prefill", unit="s", queries=tuple(
            Query(expr=quantile(share, "queue_seconds", where=""), legend=f"p{share * 100:g}")
            for share in (0.5, 0.95, 0.99))),
        Panel(title="Failures", unit="cps", queries=(
            Query(expr=or_zero(rate("transfer_failed_total", "reason", where="")), legend="sent: {{reason}}"),
            Query(expr=or_zero(rate("receive_failed_total", "reason", where="")), legend="got: {{reason}}"),
            Query(expr=rate("late_blocks_total", where=""), legend="late blocks"),
            Query(expr=rate("leases_expired_total", where=""), legend="leases expired"),
        )),
    ),
)  # fmt: skip

DECODE = Dashboard(
    uid="decode",
    title="kvferry / Decode",
    panels=(
        Panel(title="Inter-token latency", unit="s", bad=NEXT_TOKEN_S,
              queries=quantiles("inter_token_latency_seconds")),
        heat_map("Inter-token latency, all tokens", "inter_token_latency_seconds"),
        Panel(title="Decode step", unit="s", queries=quantiles("decode_step_seconds")),
        heat_map("Decode step, all steps", "decode_step_seconds"),
        Panel(title="Inter-token latency by method, p95", unit="s", queries=(
            Query(expr=quantile(0.95, "inter_token_latency_seconds", by="method"), legend="{{method}}"),)),
        Panel(title="Tokens per second", unit="short", stacked=True, queries=(
            Query(expr=rate("decode_tokens_total", "method"), legend="{{method}}"),)),
        Panel(title="Running batch", unit="short", queries=(
            Query(expr=f"sum by (instance) ({selected('decode_batch_size')})", legend="{{instance}}"),)),
        Panel(title="Requests", unit="short", queries=(
            Query(expr=f"sum({selected('requests_running')})", legend="running"),
            Query(expr=f"sum({selected('requests_waiting')})", legend="waiting"),
        )),
        Panel(title="Arena", unit="bytes", stacked=True, about="The sum is constant.", queries=(
            Query(expr=f"sum by (state) ({selected('arena_bytes', '')})", legend="{{state}}"),)),
        Panel(title="Arena in use", unit="percentunit", bad=0.9, queries=(
            Query(expr=f"instance:kvferry_arena_used:ratio{{{INSTANCE}}}", legend="{{instance}}"),)),
        Panel(title="Workers", kind="table", unit="short", by="instance", queries=(
            Query(expr=f"sum by (instance) ({selected('decode_batch_size')})", legend="batch"),
            Query(expr=rate("decode_tokens_total", "instance"), legend="tokens a second"),
            Query(expr=f"sum by (instance) (instance:kvferry_arena_used:ratio{{{INSTANCE}}})",
                  legend="arena in use", unit="percentunit"),
            Query(expr=quantile(0.95, "decode_step_seconds", by="instance"), legend="step, p95", unit="s"),
        )),
        Panel(title="Last block to first step", unit="s", queries=quantiles("admission_seconds")),
        Panel(title="Decode steps by path", unit="cps", stacked=True,
              about="CUDA graph, or eager: on a CPU, with an attention that has no kernel, or before a new "
                    "shape of batch is captured.", queries=(
                  Query(expr=rate("decode_steps_total", "path, reason", where=""),
                        legend="{{path}} {{reason}}"),)),
        Panel(title="Decode steps captured", unit="cps",
              about="As CUDA graphs, in the warm-up or under load, where each holds the batch up once.",
              queries=(Query(expr=or_zero(rate("decode_captures_total", "when", where="")),
                             legend="{{when}}"),)),
        Panel(title="Reservations refused", unit="cps", queries=(
            Query(expr=or_zero(rate("admission_rejected_total", "reason", where="")), legend="{{reason}}"),)),
        Panel(title="Quarantined kernels", unit="none", bad=1,
              about="Their calls take the torch path until the worker is restarted; its log has the reason.",
              queries=(Query(expr=or_zero(f"sum by (op, reason) ({selected('kernel_quarantined', '')})"),
                             legend="{{op}} {{reason}}"),)),
    ),
)  # fmt: skip

SESSIONS = Dashboard(
    uid="sessions",
    title="kvferry / Sessions",
    panels=(
        Panel(title="History by tier", unit="bytes", stacked=True, queries=(
            Query(expr=f"sum by (tier) ({selected('history_bytes', '')})", legend="{{tier}}"),)),
        Panel(title="Prompt tokens by source", unit="short", stacked=True, about="Per second.", queries=(
            Query(expr=rate("prompt_tokens_reused_total", "source"), legend="reused: {{source}}"),
            Query(expr=rate("prefill_tokens_total", "model"), legend="computed"),
        )),
        Panel(title="Share of prompt tokens reused", unit="percentunit", queries=(
            Query(expr=f"{rate('prompt_tokens_reused_total', 'source')} / ignoring (source) group_left "
                       f"{rate('prompt_tokens_total')}", legend="{{source}}"),)),
        Panel(title="Loading history of a resumed turn", unit="s", queries=quantiles("history_load_seconds")),
        heat_map("Loading history, all turns", "history_load_seconds"),
        Panel(title="Storing a turn's history", unit="s", queries=quantiles("history_store_seconds")),
        Panel(title="Sessions that Redis could not serve", unit="cps", queries=(
            Query(expr=or_zero(rate("session_store_events_total", "event", where="")), legend="{{event}}"),)),
        Panel(title="Histories missing", unit="cps", queries=(
            Query(expr=or_zero(rate("history_miss_total", "reason", where="")), legend="{{reason}}"),)),
        Panel(title="Turns by where their history came from", unit="cps", queries=(
            Query(expr=or_zero(rate("history_choices_total", "way, reason", where="")),
                  legend="{{way}}, {{reason}}"),)),
        Panel(title="Generated KV returned to history", unit="Bps", queries=(
            Query(expr=rate("history_returned_bytes_total", "model"), legend="{{model}}"),)),
    ),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, TRANSFER, DECODE, SESSIONS)


# ---- Grafana's form --------------------------------------------------------------------------------------


def render(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as the JSON that Grafana provisions."""
    return {
        "uid": f"kvferry-{dashboard.uid}",
        "title": dashboard.title,
        "tags": ["kvferry"],
        "schemaVersion": 41,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "title": "kvferry", "tags": ["kvferry"], "asDropdown": False, "icon": "",
             "includeVars": True, "keepTime": True, "targetBlank": False, "tooltip": "", "url": ""}
        ],
        "templating": {"list": [_source_variable(), *_variables(dashboard)]},
        "panels": _placed(dashboard.panels),
    }  # fmt: skip


def _source_variable() -> dict[str, Any]:
    """The first one is that of `provisioning`."""
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "multi": False,
        "includeAll": False,
        "current": {"text": "Prometheus", "value": "prometheus"},
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Those that the panels use."""
    services = '{__name__=~"kvferry_(ready|prefill_warm_up_ratio|decode_warm_up_ratio)"}'
    families = {
        "model": "kvferry_requests_running",
        "instance": services,
        "method": "kvferry_generation_tokens_total",
    }
    used = "".join(query.expr for panel in dashboard.panels for query in panel.queries)
    return [_variable(name, name.title(), family) for name, family in families.items() if f"${name}" in used]


def _variable(name: str, label: str, family: str) -> dict[str, Any]:
    """The values that a label has."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({family}, {name})", "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": ["$__all"]},
    }


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Panels from left to right, top to bottom."""
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + HEIGHT
        placed.append(_panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT}})
        x += panel.width
    return placed


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    form = {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series")
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _columns(panel)},
        "options": _options(panel),
        "transformations": _joined(panel),
        "targets": [
            {"refId": _name(index), "datasource": DATASOURCE, "expr": query.expr,
             "legendFormat": query.legend, "format": form, "instant": panel.kind == "table"}
            for index, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _defaults(panel: Panel) -> dict[str, Any]:
    good, bad = ("green", "red") if not panel.below_is_bad else ("red", "green")
    steps: list[dict[str, Any]] = [{"color": good, "value": None}]
    if panel.bad is not None:
        steps.append({"color": bad, "value": panel.bad})
    found = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind != "timeseries":
        return found
    custom = {
        "stacking": {"mode": "normal" if panel.stacked else "none"},
        "fillOpacity": 10,
        "thresholdsStyle": {"mode": "off" if panel.bad is None else "dashed"},
    }
    return found | {"custom": custom}


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"unit": panel.unit},
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "rowsFrame": {"layout": "le"},
                "tooltip": {"mode": "single", "yHistogram": True},
            }
        case "table":
            return {"showHeader": True, "cellHeight": "sm"}
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }


def _columns(panel: Panel) -> list[dict[str, Any]]:
    """A table's columns: their names and units."""
    if panel.kind != "table":
        return []
    return [
        {
            "matcher": {"id": "byName", "options": f"Value #{_name(index)}"},
            "properties": [
                {"id": "displayName", "value": query.legend},
                {"id": "unit", "value": query.unit or panel.unit},
            ],
        }
        for index, query in enumerate(panel.queries)
    ]


def _joined(panel: Panel) -> list[dict[str, Any]]:
    """A table has one row for each value of its label."""
    if panel.kind != "table":
        return []
    times = {f"Time {number}": True for number in range(1, len(panel.queries) + 1)}
    return [
        {"id": "joinByField", "options": {"byField": panel.by, "mode": "outer"}},
        {"id": "organize", "options": {"excludeByName": {"Time": True, **times}}},
    ]


def _name(index: int) -> str:
    return chr(ord("A") + index)


def main() -> None:
    for dashboard in DASHBOARDS:
        path = FOLDER / f"{dashboard.uid}.json"
        path.write_text(json.dumps(render(dashboard), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
