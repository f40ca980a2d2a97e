"""What every service's process needs: addresses, metrics over HTTP, the ready file, signals.

start ──► listen ──► announce_ready(ready_file) ──► wait_for_signal() ──► close_within(...) ──► exit
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvferry.shared.errors import ConfigurationError

logger = structlog.get_logger(__name__)

_REQUEST_TIMEOUT_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


# ---- addresses -------------------------------------------------------------------------------------------


def parse_address(option: str, value: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as host and port.

    Raises: ConfigurationError naming the option, its value and what is allowed.
    """
    host, colon, port = value.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigurationError(f"{option} is {value!r}; it must be host:port with a port of 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    return host in ("localhost", "::1") or host.startswith("127.")


def format_address(host: str, port: int) -> str:
    """Inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(address: str) -> str:
    """Where a client on this machine connects to a bound `host:port`: loopback if bound to all addresses."""
    host, port = parse_address("address", address)
    return format_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def check_free(option: str, value: str) -> None:
    """Check that an address can be bound, before starting what takes long.

    Raises: ConfigurationError naming the option.
    """
    host, port = parse_address(option, value)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigurationError(f"{option} is {value!r}; it cannot be bound: {error}") from error


# ---- metrics over HTTP -----------------------------------------------------------------------------------


class MetricsServer(ThreadingHTTPServer):
    """A running metrics endpoint: an HTTP server and its thread, and a short-lived thread for each request.

    Made by `serve_metrics`.
    """

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, is_ready: Callable[[], bool] | None
    ) -> None:
        self.registry = registry
        self.is_ready = is_ready
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _MetricsHandler)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics-http", daemon=True
        )
        self._thread.start()

    def server_bind(self) -> None:
        # HTTPServer's own method looks up the host by DNS, which can take seconds and is not needed.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def address(self) -> str:
        """host:port as bound."""
        return format_address(self.server_name, self.server_port)

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join(timeout=_REQUEST_TIMEOUT_S)
        self.server_close()


def serve_metrics(
    registry: CollectorRegistry, listen: str, *, is_ready: Callable[[], bool] | None = None
) -> MetricsServer:
    """Serve `/metrics` of a registry, `/health` and `/ready` from a thread.

    Args:
        listen: host:port; port 0 picks a free one.
        is_ready: decides whether `/ready` answers 200 or 503, called from the server's threads; None: 404.
    Raises: ConfigurationError for a malformed address or one that cannot be bound.
    """
    host, port = parse_address("metrics_listen", listen)
    try:
        return MetricsServer(registry, host, port, is_ready)
    except OSError as error:
        raise ConfigurationError(f"metrics_listen is {listen!r}; it cannot be bound: {error}") from error


class _MetricsHandler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._reply(200, content_type, encode(self.server.registry))
        elif path == "/health":
            self._reply(200, "application/json", b'{"status": "ok"}')
        elif path == "/ready" and self.server.is_ready is not None:
            if self.server.is_ready():
                self._reply(200, "application/json", b'{"status": "ready"}')
            else:
                self._reply(503, "application/json", b'{"status": "not ready"}')
        else:
            allowed = b"paths: /metrics, /health, and /ready of workers\n"
            self._reply(404, "text/plain; charset=utf-8", allowed)

    def _reply(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("metrics request", line=format % args)


# ---- start and stop of a process -------------------------------------------------------------------------


def announce_ready(path: str, info: Mapping[str, str]) -> None:
    """Write one JSON line with a service's addresses, so that the process which started it learns its ports.

    The file is written atomically. An empty path does nothing.

    Raises: ConfigurationError if the file cannot be written.
    """
    if not path:
        return
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(dict(info), sort_keys=True) + "\n", encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        raise ConfigurationError(f"ready_file is {path!r}; it cannot be written: {error}") from error


async def wait_for_signal() -> signal.Signals:
    """Wait for SIGINT or SIGTERM and return it. A second signal has its usual effect and ends the process."""
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in _SIGNALS:
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        return await received.get()
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def serve_until_signal(role: str, addresses: Mapping[str, str], ready_file: str) -> None:
    """Write the ready file of a service that listens, then wait for SIGINT or SIGTERM. The next one ends the
    process at once.

    Args: addresses: `address` (control or HTTP, host:port), `metrics` (host:port), of workers `blocks`.
    """
    announce_ready(ready_file, {"service": role, **addresses})
    logger.info(f"{role} listens", **addresses)
    await wait_for_signal()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # asyncio would close everything in order
    logger.info(f"{role} stops")


def end_within(timeout_s: float) -> None:
    """End the process if it has not ended by then, whatever its threads wait for."""

    def end() -> None:
        time.sleep(timeout_s)
        logger.error("the process did not stop in time and is ended", timeout_s=timeout_s)
        os._exit(1)

    threading.Thread(target=end, name="end-within", daemon=True).start()


async def close_within(timeout_s: float, what: str, closing: Awaitable[object]) -> bool:
    """Await a graceful close for at most `timeout_s` seconds; returns whether it ended in time."""
    try:
        await asyncio.wait_for(closing, timeout_s)
    except TimeoutError:
        logger.warning("close timed out", what=what, timeout_s=timeout_s)
        return False
    return True
