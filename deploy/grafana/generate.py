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
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
COLUMNS = 24
HEIGHT = 8

Kind = Literal["timeseries", "stat"]


@dataclass(frozen=True, kw_only=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str = "__auto"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. `unit` is Grafana's name for it; `width` is in columns, 24 to a row."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    about: str = ""
    kind: Kind = "timeseries"
    width: int = 12
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One dashboard, in a file that is named after `uid`."""

    uid: str
    title: str
    panels: tuple[Panel, ...] = field(default=())


# ---- parts of expressions --------------------------------------------------------------------------------

RATE = "[$__rate_interval]"
MODEL = 'model=~"$model"'


def rate(family: str, by: str, *, where: str = MODEL) -> str:
    """A counter's rate, summed over all labels but `by`."""
    return f"sum by ({by}) (rate(kvferry_{family}{{{where}}}{RATE}))"


def quantile(share: float, family: str, *, by: str = "", where: str = MODEL) -> str:
    labels = ", ".join(filter(None, ("le", by)))
    return (
        f"histogram_quantile({share:g}, sum by ({labels}) (rate(kvferry_{family}_bucket{{{where}}}{RATE})))"
    )


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
        Panel(title="Ready", kind="stat", width=4, unit="bool_yes_no",
              queries=(Query(expr="min(kvferry_ready)"),)),
        Panel(title="Services up", kind="stat", width=4, unit="short",
              queries=(Query(expr='sum by (job) (up{job=~"router|prefill|decode"})', legend="{{job}}"),)),
        Panel(title="Alerts firing", kind="stat", width=4, unit="short",
              queries=(Query(expr=or_zero('count(ALERTS{alertstate="firing"})')),)),
        Panel(title="First token within 2 s", kind="stat", width=6, unit="percentunit",
              about="Objective: 95 %. Over the last hour.",
              queries=(Query(expr=f"1 - model:kvferry_time_to_first_token_slow:ratio_rate1h{{{MODEL}}}",
                             legend="{{model}}"),)),
        Panel(title="Next token within 100 ms", kind="stat", width=6, unit="percentunit",
              about="Objective: 99 %. Over the last hour.",
              queries=(Query(expr=f"1 - model:kvferry_inter_token_latency_slow:ratio_rate1h{{{MODEL}}}",
                             legend="{{model}}"),)),
        Panel(title="Error budget burn rate", unit="none",
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
        Panel(title="Time to first token", unit="s", queries=quantiles("time_to_first_token_seconds")),
        Panel(title="Request latency", unit="s", queries=quantiles("e2e_request_latency_seconds")),
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
        Panel(title="Prefill time", unit="s", queries=quantiles("prefill_seconds")),
        Panel(title="Waiting for prefill", unit="s", queries=tuple(
            Query(expr=quantile(share, "queue_seconds", where=""), legend=f"p{share * 100:g}")
            for share in (0.5, 0.95, 0.99))),
        Panel(title="Failures", unit="cps", queries=(
            Query(expr=or_zero(rate("transfer_failed_total", "reason", where="")), legend="sent: {{reason}}"),
            Query(expr=or_zero(rate("receive_failed_total", "reason", where="")), legend="got: {{reason}}"),
            Query(expr=f"sum(rate(kvferry_late_blocks_total{RATE}))", legend="late blocks"),
            Query(expr=f"sum(rate(kvferry_leases_expired_total{RATE}))", legend="leases expired"),
        )),
    ),
)  # fmt: skip

DECODE = Dashboard(
    uid="decode",
    title="kvferry / Decode",
    panels=(
        Panel(title="Inter-token latency", unit="s", queries=quantiles("inter_token_latency_seconds")),
        Panel(title="Decode step", unit="s", queries=quantiles("decode_step_seconds")),
        Panel(title="Inter-token latency by method, p95", unit="s", queries=(
            Query(expr=quantile(0.95, "inter_token_latency_seconds", by="method"), legend="{{method}}"),)),
        Panel(title="Tokens per second", unit="short", stacked=True, queries=(
            Query(expr=rate("decode_tokens_total", "method"), legend="{{method}}"),)),
        Panel(title="Running batch", unit="short", queries=(
            Query(expr=f"sum by (instance) (kvferry_decode_batch_size{{{MODEL}}})", legend="{{instance}}"),)),
        Panel(title="Requests", unit="short", queries=(
            Query(expr=f"sum(kvferry_requests_running{{{MODEL}}})", legend="running"),
            Query(expr=f"sum(kvferry_requests_waiting{{{MODEL}}})", legend="waiting"),
        )),
        Panel(title="Arena", unit="bytes", stacked=True, about="The sum is constant.", queries=(
            Query(expr="sum by (state) (kvferry_arena_bytes)", legend="{{state}}"),)),
        Panel(title="Arena in use", unit="percentunit", queries=(
            Query(expr="instance:kvferry_arena_used:ratio", legend="{{instance}}"),)),
        Panel(title="Last block to first step", unit="s", queries=quantiles("admission_seconds")),
        Panel(title="Decode steps by path", unit="cps", stacked=True,
              about="CUDA graph, or eager: on a CPU, or with an attention that has no kernel.", queries=(
                  Query(expr=f"sum by (path, reason) (rate(kvferry_decode_steps_total{RATE}))",
                        legend="{{path}} {{reason}}"),)),
        Panel(title="Reservations refused", unit="cps", queries=(
            Query(expr=or_zero(rate("admission_rejected_total", "reason", where="")), legend="{{reason}}"),)),
        Panel(title="Quarantined kernels", unit="none",
              about="Their calls take the torch path until the worker is restarted; its log has the reason.",
              queries=(Query(expr=or_zero("sum by (op, reason) (kvferry_kernel_quarantined)"),
                             legend="{{op}} {{reason}}"),)),
    ),
)  # fmt: skip

SESSIONS = Dashboard(
    uid="sessions",
    title="kvferry / Sessions",
    panels=(
        Panel(title="History by tier", unit="bytes", stacked=True, queries=(
            Query(expr="sum by (tier) (kvferry_history_bytes)", legend="{{tier}}"),)),
        Panel(title="Prompt tokens by source", unit="short", stacked=True, about="Per second.", queries=(
            Query(expr=rate("prompt_tokens_reused_total", "source"), legend="reused: {{source}}"),
            Query(expr=rate("prefill_tokens_total", "model"), legend="computed"),
        )),
        Panel(title="Share of prompt tokens reused", unit="percentunit", queries=(
            Query(expr=f"{rate('prompt_tokens_reused_total', 'source')} / ignoring (source) group_left "
                       f"sum(rate(kvferry_prompt_tokens_total{{{MODEL}}}{RATE}))", legend="{{source}}"),)),
        Panel(title="Loading history of a resumed turn", unit="s", queries=quantiles("history_load_seconds")),
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
        "templating": {"list": [_model_variable()]},
        "panels": _placed(dashboard.panels),
    }  # fmt: skip


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(kvferry_requests_running, model)", "refId": "model"},
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
    custom = {"stacking": {"mode": "normal" if panel.stacked else "none"}, "fillOpacity": 10}
    options: dict[str, Any] = (
        {"reduceOptions": {"calcs": ["lastNotNull"]}}
        if panel.kind == "stat"
        else {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
              "tooltip": {"mode": "multi", "sort": "desc"}}
    )  # fmt: skip
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0} | ({} if panel.kind == "stat" else {"custom": custom}),
            "overrides": [],
        },
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query.expr,
             "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


def main() -> None:
    for dashboard in DASHBOARDS:
        path = FOLDER / f"{dashboard.uid}.json"
        path.write_text(json.dumps(render(dashboard), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
