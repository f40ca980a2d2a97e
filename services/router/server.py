"""The router as a process: loads the tokenizer, connects to its workers, and serves HTTP until a signal."""

from __future__ import annotations

import asyncio
import gc
import secrets
from contextlib import AsyncExitStack
from functools import partial
from operator import attrgetter
from typing import Any

from kvferry.services.router.app import create_app
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.http.server import http_server
from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.control.calls import DecodeControl, PrefillControl
from kvferry.shared.control.client import GrpcDecodeClient, GrpcPrefillClient
from kvferry.shared.model.checkpoint import sampling_defaults
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.logging import setup_logging
from kvferry.shared.process.serving import serve_until_signal
from kvferry.shared.telemetry.metrics import RouterMetrics, certificate_expiry
from kvferry.shared.telemetry.tracing import setup_tracing
from kvferry.shared.trust.certs import Certs


async def run(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises: ConfigurationError, UnsupportedModel: the router cannot start.
    """
    setup_logging(config.log_level, config.log_format, "router")
    install_tables(config.epsilon_tables, calibration=config.calibration)
    async with AsyncExitStack() as stack:
        stack.callback(setup_tracing(config.otlp_endpoint, "router"))
        address = await start_router(config, *grpc_pools(config), stack)
        # Objects made at start-up stay: a garbage collection that visits them all would block the event loop.
        gc.collect()
        gc.freeze()
        await serve_until_signal("router", {"address": address, "metrics": address}, config.ready_file)


async def start_router(
    config: RouterConfig,
    prefill: WorkerPool[PrefillControl],
    decode: WorkerPool[DecodeControl],
    stack: AsyncExitStack,
) -> str:
    """Serve HTTP until the stack is closed. Returns: the address as bound."""
    metrics = RouterMetrics()
    if config.certs:
        certificate_expiry(metrics.registry, Certs(config.certs, "router").expires_at_s)
    app = create_app(
        config,
        prefill=prefill,
        decode=decode,
        tokenizer=await asyncio.to_thread(ChatTokenizer.load, config.model),
        sampling_defaults=await asyncio.to_thread(sampling_defaults, config.generation_config, config.model),
        metrics=metrics,
    )
    return await stack.enter_async_context(http_server(app, config))


def grpc_pools(config: RouterConfig) -> tuple[WorkerPool[PrefillControl], WorkerPool[DecodeControl]]:
    """Return pools of the configured workers, over gRPC."""
    prefill, decode = split_list(config.prefill_workers), split_list(config.decode_workers)
    certs = Certs(config.certs, "router") if config.certs else None
    calling: dict[str, Any] = {"certs": certs, "router": secrets.token_hex(8)}
    polling: dict[str, Any] = {
        "disconnect": _close,
        "heard_s": attrgetter("heard_s"),
        "status_interval_s": config.status_interval_s,
    }
    return (
        WorkerPool("prefill", prefill, connect=partial(GrpcPrefillClient, **calling), **polling),
        WorkerPool("decode", decode, connect=partial(GrpcDecodeClient, **calling), **polling),
    )


async def _close(client: object) -> None:
    assert isinstance(client, GrpcPrefillClient | GrpcDecodeClient), "the pool closes what it connected"
    await client.close()
