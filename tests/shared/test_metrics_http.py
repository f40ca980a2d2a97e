"""A process's surroundings: the metrics endpoint, addresses, the ready file, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from kvtest.ports import free_port
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.process.serving import (
    announce_ready,
    bind,
    close_within,
    format_address,
    parse_address,
    reachable,
    wait_for_signal,
)
from kvferry.shared.telemetry.metrics import DecodeMetrics, PrefillMetrics
from kvferry.shared.telemetry.metrics_server import serve_metrics


def test_metrics_are_served_from_the_registry_given() -> None:
    decode = DecodeMetrics()
    decode.late_blocks.inc(3)
    server = serve_metrics(decode.registry, "127.0.0.1:0")
    try:
        reply = httpx.get(f"http://{server.address}/metrics", timeout=10)
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(reply.text)
            for sample in family.samples
        }
        assert values["kvferry_late_blocks_total"] == 3
        assert reply.headers["content-type"].startswith("text/plain")
    finally:
        server.close()


def test_ready_answers_what_the_service_says_now_and_is_absent_where_none_can() -> None:
    answers = iter(("", "it starts"))
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0", problem=lambda: next(answers))
    silent = serve_metrics(CollectorRegistry(), "127.0.0.1:0")
    try:
        replies = [httpx.get(f"http://{server.address}/ready", timeout=30) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [200, 503]
        assert replies[1].json() == {"status": "not ready", "reason": "it starts"}
        assert httpx.get(f"http://{silent.address}/ready", timeout=30).status_code == 404
    finally:
        server.close()
        silent.close()


def test_two_services_in_one_process_do_not_share_families() -> None:
    decode = serve_metrics(DecodeMetrics().registry, "127.0.0.1:0")
    prefill = serve_metrics(PrefillMetrics().registry, "127.0.0.1:0")
    try:
        assert "kvferry_late_blocks" not in httpx.get(f"http://{prefill.address}/metrics", timeout=10).text
        assert "kvferry_late_blocks" in httpx.get(f"http://{decode.address}/metrics", timeout=10).text
    finally:
        decode.close()
        prefill.close()


def test_health_answers_and_other_paths_are_404() -> None:
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0")
    try:
        assert httpx.get(f"http://{server.address}/health", timeout=10).json() == {"status": "ok"}
        assert httpx.get(f"http://{server.address}/else", timeout=10).status_code == 404
    finally:
        server.close()


def test_close_frees_port_and_thread_and_may_be_repeated() -> None:
    before = threading.active_count()
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0")
    address = server.address
    server.close()
    server.close()
    assert threading.active_count() == before
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/health", timeout=10)
    serve_metrics(CollectorRegistry(), address).close()


def test_an_occupied_port_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = format_address(*taken.getsockname())
        with pytest.raises(ConfigurationError, match=f"metrics_listen is '{address}'"):
            serve_metrics(CollectorRegistry(), address)


@pytest.mark.parametrize(
    "value", ["", "8000", ":8000", "host:", "host:-1", "host:65536", "host:x", "host:\u0661"]
)
def test_malformed_addresses_name_the_option(value: str) -> None:
    with pytest.raises(ConfigurationError, match="listen is"):
        parse_address("listen", value)


@pytest.mark.parametrize("address", [("127.0.0.1", 0), ("::1", 65535), ("decode.internal", 9002)])
def test_addresses_survive_formatting(address: tuple[str, int]) -> None:
    assert parse_address("listen", format_address(*address)) == address


@pytest.mark.parametrize(
    ("bound", "client"),
    [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("10.0.0.7:80", "10.0.0.7:80")],
)
def test_an_address_bound_to_all_is_reached_on_loopback(bound: str, client: str) -> None:
    assert reachable(bound) == client


def test_an_occupied_address_is_found_early() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = format_address(*taken.getsockname())
        with pytest.raises(ConfigurationError, match=f"listen is '{address}'; it cannot be bound"):
            bind("listen", address)
    bind("listen", address).close()


def test_free_port_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_ready_file_holds_one_json_line_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "ready"
    announce_ready(str(target), {"service": "decode", "address": "127.0.0.1:1"})
    announce_ready(str(target), {"service": "decode", "address": "127.0.0.1:2"})
    assert json.loads(target.read_text()) == {"service": "decode", "address": "127.0.0.1:2"}
    assert os.listdir(tmp_path) == ["ready"]
    announce_ready("", {"service": "decode"})


def test_unwritable_ready_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ready_file"):
        announce_ready(str(tmp_path / "missing" / "ready"), {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_wait_for_signal_returns_the_signal_and_restores_handlers(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    waiting = asyncio.create_task(wait_for_signal())
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(waiting, 10) is number
    assert signal.getsignal(number) in (before, signal.default_int_handler, signal.SIG_DFL)


async def test_close_within_tells_whether_closing_ended_in_time() -> None:
    assert await close_within(10, "quick", asyncio.sleep(0))
    assert not await close_within(0.01, "stuck", asyncio.Event().wait())
