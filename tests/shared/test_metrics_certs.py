"""With certs a worker's metrics answer Prometheus and the router; others get a TLS alert at most."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from kvtest.ports import free_port
from kvtest.waiting import until
from prometheus_client import CollectorRegistry

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.process.serving import parse_address
from kvferry.shared.telemetry import metrics_server
from kvferry.shared.telemetry.metrics_server import MetricsServer, serve_metrics
from kvferry.shared.trust.certs import Certs, Role
from kvferry.tools.certs import make_certs

DEPLOYED = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"
PATHS = ("/metrics", "/health", "/ready", "/else")
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder, days=2, everything=False)
    make_certs(folder / "strangers", days=2, everything=False)
    return folder


@contextlib.contextmanager
def serving(folder: Path, role: Role | None) -> Iterator[MetricsServer]:
    """With TLS if it has a role."""
    certs = Certs(str(folder), role) if role is not None else None
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0", problem=lambda: "", certs=certs)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server(folder: Path) -> Iterator[MetricsServer]:
    with serving(folder, "decode") as server:
        yield server


def reader_of(folder: Path, role: Role | None) -> ssl.SSLContext | None:
    """The context of a client that a server of the role answers."""
    return Certs(str(folder), "metrics").client_context() if role is not None else None


EITHER = pytest.mark.parametrize("role", [None, "decode"])


def answers(server: MetricsServer, context: ssl.SSLContext | None) -> list[int]:
    """The status of each path, 0 where there is no answer; without a context over plain HTTP."""
    statuses = []
    with httpx.Client(verify=context or True, timeout=TIMEOUT_S, trust_env=False) as client:
        for path in PATHS:
            try:
                scheme = "http" if context is None else "https"
                statuses.append(client.get(f"{scheme}://{server.address}{path}").status_code)
            except httpx.TransportError:
                statuses.append(0)
    return statuses


@pytest.mark.parametrize("role", ["router", "metrics"])
def test_readers_get_answers(server: MetricsServer, folder: Path, role: Role) -> None:
    assert answers(server, Certs(str(folder), role).client_context()) == [200, 200, 200, 404]


def test_nobody_else_does(server: MetricsServer, folder: Path) -> None:
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    stranger = Certs(str(folder / "strangers"), "metrics").client_context()
    stranger.verify_mode = ssl.CERT_NONE
    workers = [Certs(str(folder), role).client_context() for role in ("prefill", "decode")]
    for context in (None, without, stranger, *workers):
        assert answers(server, context) == [0, 0, 0, 0]


def test_plain_bytes_get_an_alert_at_most(server: MetricsServer) -> None:
    with socket.create_connection(parse_address("metrics", server.address), timeout=TIMEOUT_S) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := plain.recv(1000):
                received += chunk
    assert received[:1] in (b"", b"\x15"), "TLS' record type of alerts"
    assert len(received) <= 7


@EITHER
def test_400_clients_that_send_no_request_hold_up_nobody(
    folder: Path, role: Role | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "HANDSHAKE_S", TIMEOUT_S)
    with serving(folder, role) as server, contextlib.ExitStack() as stack:
        address = parse_address("metrics", server.address)
        with server._lock:  # none is accepted meanwhile
            for _ in range(400):
                stack.enter_context(socket.create_connection(address, timeout=5.0))
        assert answers(server, reader_of(folder, role))[0] == 200
        until(lambda: threading.active_count() < 1.5 * metrics_server.MAX_WAITING)


@EITHER
@pytest.mark.parametrize("sent", ["nothing", "a little"])
def test_a_connection_that_sends_no_request_in_time_is_closed(
    folder: Path, role: Role | None, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "HANDSHAKE_S", 0.5)
    beginning = b"GET /metrics HTTP/1.1\r\nX: " if role is None else b"\x16\x03\x01\x40\x00"
    rest = itertools.chain(beginning, itertools.repeat(0))
    with serving(folder, role) as server, socket.socket() as connection:
        connection.connect(parse_address("metrics", server.address))
        connection.settimeout(0.02)
        deadline_s = time.monotonic() + 5.0
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline_s:
                if sent == "a little":
                    connection.sendall(bytes([next(rest)]))
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(1) == b""
                    break
        assert time.monotonic() < deadline_s
        monkeypatch.undo()
        assert answers(server, reader_of(folder, role))[0] == 200


def test_a_reader_refuses_a_server_that_is_no_worker(server: MetricsServer, folder: Path) -> None:
    """Prometheus sends nothing to whoever took a worker's address."""
    reader = Certs(str(folder / "strangers"), "metrics").client_context()
    assert answers(server, reader) == [0, 0, 0, 0]


def test_files_that_do_not_belong_together_are_a_named_error(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "decode").iterdir():
        shutil.copy(file, tmp_path / file.name)
    shutil.copy(folder / "prefill" / "tls.key", tmp_path / "tls.key")
    with pytest.raises(ConfigurationError, match="certs has no usable TLS files in"):
        serve_metrics(CollectorRegistry(), "127.0.0.1:0", certs=Certs(str(tmp_path), "decode"))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_scrapes_with_the_deployed_configuration(folder: Path, tmp_path: Path) -> None:
    """But for the addresses and the folder of the certificates, which are a container's."""
    text = DEPLOYED.read_text(encoding="utf-8").replace("/run/kvferry/certs/metrics", str(folder / "metrics"))
    config: dict[str, Any] = yaml.safe_load(text)
    workers = [job for job in config["scrape_configs"] if job["job_name"] in ("prefill", "decode")]
    address = f"127.0.0.1:{free_port()}"
    with serving(folder, "prefill") as prefill, serving(folder, "decode") as decode:
        for job, server in zip(workers, (prefill, decode), strict=True):
            del job["dns_sd_configs"]
            job["static_configs"] = [{"targets": [server.address]}]
        config |= {"global": {"scrape_interval": "1s"}, "rule_files": [], "scrape_configs": workers}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}",
             f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deadline_s = time.monotonic() + TIMEOUT_S
            up: dict[str, str] = {}
            while up != {"prefill": "1", "decode": "1"}:
                assert time.monotonic() < deadline_s, up
                time.sleep(0.2)
                with contextlib.suppress(httpx.TransportError):
                    reply = httpx.get(f"http://{address}/api/v1/query", params={"query": "up"}, timeout=10)
                    found = reply.json().get("data", {}).get("result", []) if reply.is_success else []
                    up = {each["metric"]["job"]: each["value"][1] for each in found}
        finally:
            process.kill()
            process.wait(30)
