"""A real Prometheus scrapes real services under load, with our rules; every panel's query returns data."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from kvtest.ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = shutil.which("prometheus")
TIMEOUT_S = 200.0
MACROS = {"$__rate_interval": "5m", "$model": ".*", "$instance": ".*", "$method": ".*"}

pytestmark = [
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed; apt install prometheus"),
]


def configuration(stack: Any) -> dict[str, Any]:
    """The deployed configuration, but for the targets' addresses and a shorter interval."""
    config: dict[str, Any] = yaml.safe_load(
        (DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8")
    )
    urls = {
        "router": stack.base_url,
        "prefill": stack.prefill_metrics_url,
        "decode": stack.decode_metrics_url,
    }
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus/rules/*.yml")]
    config["scrape_configs"] = [
        {
            "job_name": job["job_name"],
            "static_configs": [{"targets": [urlsplit(urls[job["job_name"]]).netloc]}],
        }
        for job in config["scrape_configs"]
        if job["job_name"] in urls
    ]
    return config


@pytest.fixture
def prometheus(stack: Any, tmp_path: Path) -> Iterator[str]:
    """Its address."""
    assert PROMETHEUS is not None
    address = f"127.0.0.1:{free_port()}"
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration(stack)), encoding="utf-8")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={tmp_path / 'data'}",
             f"--web.listen-address={address}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait(60)


def load(base_url: str, stop: threading.Event) -> None:
    """Conversations of two turns with one method after the other, until told to stop."""
    plans = (
        {"method": "rocketkv", "token_budget": 8},
        {"method": "snapkv", "token_budget": 8},
        {"method": "full"},
    )
    turn = 0
    while not stop.is_set():
        question = (
            "the pin of the red castle is 4 2 7 1 . what is it ?" if turn % 2 == 0 else "tell me again ."
        )
        httpx.post(
            f"{base_url}/v1/chat/completions",
            json={
                "model": "demo",
                "session_id": f"dashboards-{turn // 2}",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 8,
                "logit_bias": {"6": -100},
                "kv_compression": plans[turn // 2 % len(plans)],
            },
            timeout=120,
        ).raise_for_status()
        turn += 1


def queries() -> list[tuple[str, str]]:
    return [
        (f"{path.stem}: {panel['title']}", target["expr"])
        for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
        for target in panel["targets"]
    ]


def get(address: str, path: str, **parameters: str) -> Any:
    """Raises: httpx.HTTPError while Prometheus is still starting."""
    response = httpx.get(f"{address}/api/v1/{path}", params=parameters, timeout=60)
    if response.status_code == 400:
        raise AssertionError(f"{parameters}: {response.text}")
    return response.raise_for_status().json()["data"]


def has_data(address: str, expression: str) -> bool:
    for macro, value in MACROS.items():
        expression = expression.replace(macro, value)
    # A counter of rare events is zero while it has no series; only then does the query end so.
    expression = expression.removesuffix(" or vector(0)")
    samples = get(address, "query", query=expression)["result"]
    return any(not math.isnan(float(sample["value"][1])) for sample in samples)


def is_scraped(address: str, expression: str) -> bool:
    """Whether Prometheus knows the families of an expression, though none may have a series yet."""
    known = get(address, "metadata")
    names = re.findall(r"\b(?:kvferry_\w+|ALERTS)\b", expression)
    assert names
    return all(name == "ALERTS" or {name, name.removesuffix("_total")} & known.keys() for name in names)


def rules_in_order(address: str) -> bool:
    groups = get(address, "rules")["groups"]
    return bool(groups) and all(rule["health"] == "ok" for group in groups for rule in group["rules"])


def health(prometheus: str) -> dict[str, str]:
    """Whether each service was scraped; a busy machine may miss one scrape."""
    targets = get(prometheus, "targets")["activeTargets"]
    return {target["labels"]["job"]: target["health"] for target in targets}


def test_every_panel_has_data_under_load(stack: Any, prometheus: str) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            load(stack.base_url, stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        missing = queries()
        deadline_s = time.monotonic() + TIMEOUT_S
        while missing or not rules_in_order(prometheus):
            assert failures == []
            assert time.monotonic() < deadline_s, missing
            time.sleep(1)
            try:
                missing = [
                    (place, expression)
                    for place, expression in missing
                    if not has_data(prometheus, expression)
                    and not (expression.endswith(" or vector(0)") and is_scraped(prometheus, expression))
                ]
            except httpx.HTTPError:
                continue
        while health(prometheus) != {"router": "up", "prefill": "up", "decode": "up"}:
            assert time.monotonic() < deadline_s, health(prometheus)
            time.sleep(1)
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert failures == []
