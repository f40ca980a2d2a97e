"""The router as a process: loads the tokenizer, knows its workers by address, serves HTTP until a signal.

Wires; decides nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import structlog

from kvferry.services.router.app import create_app
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.http_server import http_server
from kvferry.services.router.placement import WorkerPool
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.control.client import GrpcDecodeClient, GrpcPrefillClient
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.logging import setup_logging
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.serving import Announce, announce_ready, wait_for_signal
from kvferry.shared.telemetry import setup_tracing

_log = structlog.get_logger(__name__)


async def run(config: RouterConfig, announce: Announce | None = None) -> None:
    """Serve until SIGINT or SIGTERM.

    Args: announce: told once, with the addresses, that the router listens; the ready file is written besides.
    Raises: ConfigurationError, UnsupportedModel: the router cannot start.
    """
    setup_logging(config.log_level, config.log_format, "router")
    install_tables(config.epsilon_tables)
    stop_tracing = setup_tracing(config.otlp_endpoint, "router")
    tokenizer = await asyncio.to_thread(ChatTokenizer.load, config.model)
    app = create_app(config, prefill=prefill_pool(config), decode=decode_pool(config), tokenizer=tokenizer)
    async with AsyncExitStack() as stack:
        stack.callback(stop_tracing)
        address = await stack.enter_async_context(http_server(app, config))
        # Metrics are served beside everything else.
        info = {"service": "router", "address": address, "metrics": address}
        announce_ready(config.ready_file, info)
        if announce is not None:
            announce(info)
        _log.info("router listens", **info)
        await wait_for_signal()
        _log.info("router stops")


def prefill_pool(config: RouterConfig) -> WorkerPool[PrefillControl]:
    """The configured prefill workers, over gRPC."""
    clients: dict[str, GrpcPrefillClient] = {}

    def connect(address: str) -> PrefillControl:
        clients[address] = GrpcPrefillClient(address)
        return clients[address]

    async def disconnect(address: str) -> None:
        await clients.pop(address).close()

    return WorkerPool(
        "prefill",
        split_list(config.prefill_workers),
        connect=connect,
        disconnect=disconnect,
        status_interval_s=config.status_interval_s,
        status_timeout_s=config.status_timeout_s,
        resolve_interval_s=config.resolve_interval_s,
    )


def decode_pool(config: RouterConfig) -> WorkerPool[DecodeControl]:
    """The configured decode workers, over gRPC."""
    clients: dict[str, GrpcDecodeClient] = {}

    def connect(address: str) -> DecodeControl:
        clients[address] = GrpcDecodeClient(address)
        return clients[address]

    async def disconnect(address: str) -> None:
        await clients.pop(address).close()

    return WorkerPool(
        "decode",
        split_list(config.decode_workers),
        connect=connect,
        disconnect=disconnect,
        status_interval_s=config.status_interval_s,
        status_timeout_s=config.status_timeout_s,
        resolve_interval_s=config.resolve_interval_s,
    )
