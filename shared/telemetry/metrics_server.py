"""A service's metrics over HTTP, with `/health` and `/ready`, from a thread beside the service.

With certificates it speaks TLS, and only a client with the certificate of `METRICS_READERS` gets an answer.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.process.serving import HANDSHAKE_S, format_address, parse_address
from kvferry.shared.trust.certs import METRICS_READERS, Certs, tls_name

logger = structlog.get_logger(__name__)

MAX_WAITING = 128
"""The most connections that have sent no request; beyond it the oldest is closed."""
_REQUEST_TIMEOUT_S = 10.0
_READERS = frozenset(map(tls_name, METRICS_READERS))


class MetricsServer(ThreadingHTTPServer):
    """A running metrics endpoint: an HTTP server and its thread, and a thread for each connection.

        accepted ──TLS, a request's head──► answered ──► closed
            └── HANDSHAKE_S, or too many ──────────────────▲

    Made by `serve_metrics`.
    """

    request_queue_size = 1024

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        problem: Callable[[], str] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.registry = registry
        self.problem = problem
        self._tls = tls
        self._lock = threading.Lock()  # so that a descriptor reused by another connection is not shut down
        self._waiting: dict[socket.socket, float] = {}
        """Connections that have sent no request, and their deadlines."""
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

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.settimeout(_REQUEST_TIMEOUT_S)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._waiting[connection] = time.monotonic() + HANDSHAKE_S
        return connection, address

    def service_actions(self) -> None:
        """Shut down connections that took too long to send a request, and the oldest where they are too many.
        Their threads then close them."""
        now_s = time.monotonic()
        with self._lock:
            while self._waiting:
                connection, until_s = next(iter(self._waiting.items()))
                if until_s > now_s and len(self._waiting) <= MAX_WAITING:
                    return
                del self._waiting[connection]
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS' own is bound to its thread

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection, in its own thread, so that a slow handshake holds up nobody."""
        if self._tls is not None:
            request.do_handshake()
            if _READERS.isdisjoint(_names(request)):
                return
        super().finish_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.waits_no_more(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):  # of TLS, or the connection's end
            logger.debug("a metrics connection is ended", error=str(error))
        else:
            logger.exception("a metrics request failed")

    def waits_no_more(self, connection: socket.socket) -> bool:
        """Note that a request, or the end, has come; return whether the connection was not shut down."""
        with self._lock:
            return self._waiting.pop(connection, None) is not None

    @property
    def address(self) -> str:
        """The bound address, host:port."""
        return format_address(self.server_name, self.server_port)

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join(timeout=_REQUEST_TIMEOUT_S)
        self.server_close()


def serve_metrics(
    registry: CollectorRegistry,
    listen: str,
    *,
    problem: Callable[[], str] | None = None,
    certs: Certs | None = None,
) -> MetricsServer:
    """Serve `/metrics` of a registry, `/health` and `/ready` from a thread.

    Args:
        listen: host:port; port 0 picks a free one.
        problem: says why the service is not ready, with which `/ready` answers 503; "" where it is ready:
            200. Called from the server's threads. None: 404.
        certs: the service's; every path then needs TLS and a reader's certificate. None: plain HTTP.
    Raises: ConfigurationError for a malformed address or one that cannot be bound.
    """
    host, port = parse_address("metrics_listen", listen)
    tls = certs.server_context() if certs is not None else None
    try:
        return MetricsServer(registry, host, port, problem, tls)
    except OSError as error:
        raise ConfigurationError(f"metrics_listen is {listen!r}; it cannot be bound: {error}") from error


def _names(connection: ssl.SSLSocket) -> set[str]:
    """Return the common names of the client's certificate, which the handshake has verified."""
    subject: Any = (connection.getpeercert() or {}).get("subject", ())
    return {value for part in subject for key, value in part if key == "commonName"}


class _MetricsHandler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        if not self.server.waits_no_more(self.connection):
            return
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._reply(200, content_type, encode(self.server.registry))
        elif path == "/health":
            self._reply(200, "application/json", b'{"status": "ok"}')
        elif path == "/ready" and self.server.problem is not None:
            if reason := self.server.problem():
                told = json.dumps({"status": "not ready", "reason": reason}).encode()
                self._reply(503, "application/json", told)
            else:
                self._reply(200, "application/json", b'{"status": "ready"}')
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
