"""The application behind a real socket: uvicorn, with deadlines for slow clients (`middleware.py`).

Installs no signal handlers; the process around it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from kvferry.services.router.config import RouterConfig
from kvferry.services.router.http.middleware import BoundedH11Protocol
from kvferry.shared.process.draining import Drain
from kvferry.shared.process.freeing_rate import FreeingRate
from kvferry.shared.process.serving import HANDSHAKE_S, bind, format_address

_STARTUP_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 1
"""For what is left to be sent after the drain."""
_BACKLOG = 1024
_KEEP_ALIVE_S = 75
_WANTED_FILES, _OTHER_FILES = 16_384, 256
"""Open files that the process asks for, and those of them that are no client's connections."""


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, but limit TLS handshakes, which uvicorn lets last a minute, uncounted."""
        await super().startup(sockets=[])
        loop, config = asyncio.get_running_loop(), self.config
        limit_s = HANDSHAKE_S if config.is_ssl else None
        connection = partial(config.http_protocol_class, config, self.server_state, self.lifespan.state)  # type: ignore[call-arg]
        for listener in sockets or ():
            self.servers.append(
                await loop.create_server(
                    connection, sock=listener, ssl=config.ssl, ssl_handshake_timeout=limit_s
                )
            )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def http_server(app: FastAPI, config: RouterConfig) -> AsyncIterator[str]:
    """Serve `app` while the context is open, its lifespan included; yields the address as bound, `host:port`.

    On exit `/ready` answers 503 and new requests are refused, while those in flight get `shutdown_timeout_s`;
    then no connection is accepted.

    Raises: ConfigurationError where the address cannot be bound.
    """
    listener = bind("listen", config.listen, backlog=_BACKLOG)
    listener.setblocking(False)
    # Accepted connections inherit it. Without it a token waits until the client acknowledges the last one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host, port = listener.getsockname()[:2]
    server = _Server(_uvicorn_config(app, config))
    try:
        # uvicorn itself would exit the process if a lifespan fails.
        async with app.router.lifespan_context(app), _serving(server, listener, app.state.drain, config):
            yield format_address(str(host), int(port))
    finally:
        listener.close()


@asynccontextmanager
async def _serving(
    server: _Server, listener: socket.socket, drain: Drain, config: RouterConfig
) -> AsyncIterator[None]:
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
    try:
        async with asyncio.timeout(_STARTUP_TIMEOUT_S):
            while not (server.started or task.done()):
                await asyncio.sleep(0.01)
        yield
    finally:
        await drain.wait(config.shutdown_timeout_s)
        server.should_exit = True
        await asyncio.wait({task}, timeout=_END_TIMEOUT_S + 5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _uvicorn_config(app: FastAPI, config: RouterConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=type(
            "RouterHttpProtocol",
            (BoundedH11Protocol,),
            {
                "read_timeout_s": config.read_timeout_s,
                "write_timeout_s": config.write_timeout_s,
                "ended": FreeingRate(),
                "max_connections": config.max_connections or _room_for_connections(),
            },
        ),
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_END_TIMEOUT_S,
    )


def _room_for_connections() -> int:
    """Count the connections that the process may have beside other files, after raising its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = _WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return max(16, files - _OTHER_FILES)
