"""The application behind a real socket: uvicorn, with deadlines for slow clients and errors in the OpenAI
shape.

uvicorn's HTTP/1.1 protocol lacks a deadline for a request's head and one for clients that read nothing.
Installs no signal handlers; the process around it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.services.router.config import RouterConfig
from kvferry.services.router.http.errors import error_body
from kvferry.shared.errors import (
    ConfigurationError,
    HeadersTooLarge,
    InvalidRequest,
    KvferryError,
    RequestTimeout,
)
from kvferry.shared.serving import format_address, parse_address

_STARTUP_TIMEOUT_S = 60.0
_BACKLOG = 1024
_KEEP_ALIVE_S = 75
_LINGER_S = 1.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def http_server(app: FastAPI, config: RouterConfig) -> AsyncIterator[str]:
    """Serve `app` while the context is open, its lifespan included; yields the address as bound, `host:port`.

    On exit no new connection is accepted, and requests in flight get `shutdown_timeout_s`.

    Raises: ConfigurationError where the address cannot be bound.
    """
    listener = _listen(config.listen)
    host, port = listener.getsockname()[:2]
    server = _Server(_uvicorn_config(app, config))
    try:
        # uvicorn itself would exit the process where a lifespan fails.
        async with app.router.lifespan_context(app), _serving(server, listener, config):
            yield format_address(str(host), int(port))
    finally:
        listener.close()


@asynccontextmanager
async def _serving(server: _Server, listener: socket.socket, config: RouterConfig) -> AsyncIterator[None]:
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
    try:
        async with asyncio.timeout(_STARTUP_TIMEOUT_S):
            while not (server.started or task.done()):
                await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=config.shutdown_timeout_s + 5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _uvicorn_config(app: FastAPI, config: RouterConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=type(
            "RouterHttpProtocol",
            (BoundedH11Protocol,),
            {"read_timeout_s": config.read_timeout_s, "write_timeout_s": config.write_timeout_s},
        ),
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
    )


def _listen(address: str) -> socket.socket:
    host, port = parse_address("listen", address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"listen is {address!r}; it cannot be bound: {error}") from None
    listener.setblocking(False)
    return listener


class BoundedH11Protocol(H11Protocol):
    """One connection.

        accepted ──head timer──► request ──► response ──► idle (uvicorn's keep-alive timer)
                       ▲                                    │ first byte of the next head
                       └────────────────────────────────────┘

    While the client's receive window is full, a write timer runs as well; at its end the connection is reset.
    """

    read_timeout_s = 30.0
    write_timeout_s = 60.0

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._arm_head_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and self._head_timer is None:
            self._arm_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this where h11 cannot parse the input."""
        buffered_bytes = len(self.conn.trailing_data[0])
        limit_bytes = self.config.h11_max_incomplete_event_size or 0
        if limit_bytes and buffered_bytes > limit_bytes:
            self._refuse(HeadersTooLarge(f"The request's head is larger than {limit_bytes} bytes"))
        else:
            self._refuse(InvalidRequest("What was sent is not a valid HTTP/1.1 request"))

    def _refuse(self, error: KvferryError) -> None:
        """Answer input that never became a request, and close."""
        if self.conn.our_state is not h11.IDLE or self.transport.is_closing():
            self.transport.close()
            return
        body = json.dumps(error_body(error)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        answer = h11.Response(status_code=error.http_status, headers=headers, reason=b"")
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing with unread bytes resets the connection, and the client might never see the answer: stop
        # writing, and read on for a moment.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.read_timeout_s, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self.conn.their_state is not h11.IDLE:
            return
        if self.conn.trailing_data[0]:
            self._refuse(RequestTimeout(f"The request's head was not complete in {self.read_timeout_s:g} s"))
        else:
            self.transport.close()
