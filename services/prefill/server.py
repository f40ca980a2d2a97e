"""The prefill worker as a process: loads the model, serves control, blocks and metrics until a signal.

Wires; decides nothing. `build_service` is for whoever brings transports of its own, such as one process that
holds all services.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
import torch

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.history import build_store
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.control.server import serve_control
from kvferry.shared.kernel_paths import KernelCalls, choose_kernels
from kvferry.shared.logging import setup_logging
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.serving import Announce, announce_ready, close_within, serve_metrics, wait_for_signal
from kvferry.shared.telemetry import setup_tracing
from kvferry.shared.wire.interfaces import BlockSender, BlockServer, BlockSink
from kvferry.shared.wire.zmq import ZmqBlockSender, ZmqBlockServer

log = structlog.get_logger(__name__)

_CLOSE_TIMEOUT_S = 30.0


def build_service(
    config: PrefillConfig,
    *,
    model: LanguageModel,
    sender: BlockSender,
    server_factory: Callable[[BlockSink], BlockServer],
    metrics: PrefillMetrics,
) -> PrefillService:
    """A service and its history store; the caller starts and closes it.

    Args:
        sender: ships blocks to decode workers; closed with the service.
        server_factory: makes the block server for returned history, at the service's start.
    """
    return PrefillService(
        model=model,
        store=build_store(config, spec=model.spec, metrics=metrics),
        sender=sender,
        server_factory=server_factory,
        metrics=metrics,
        config=config,
        clock=time.monotonic,
    )


async def run(config: PrefillConfig, announce: Announce | None = None) -> None:
    """Serve until SIGINT or SIGTERM.

    Args: announce: told once, with the addresses, that the worker listens; the ready file is written besides.
    Raises: ConfigurationError, UnsupportedModel: the worker cannot start.
    """
    setup_logging(config.log_level, config.log_format, "prefill")
    install_tables(config.epsilon_tables)
    stop_tracing = setup_tracing(config.otlp_endpoint, "prefill")
    async with AsyncExitStack() as stack:
        stack.callback(stop_tracing)
        info = await _start(config, stack)
        announce_ready(config.ready_file, info)
        if announce is not None:
            announce(info)
        log.info("prefill listens", **info)
        await wait_for_signal()
        log.info("prefill stops")


async def _start(config: PrefillConfig, stack: AsyncExitStack) -> dict[str, str]:
    """Start everything, leaving its closing on the stack; returns the addresses."""
    if config.threads:
        torch.set_num_threads(config.threads)
    model = await asyncio.to_thread(
        load_model,
        config.model,
        name=config.model_name,
        device=config.device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
    )
    choose_kernels(config.kernels, model.device)
    metrics = PrefillMetrics()
    KernelCalls("prefill", model.device).register(metrics.registry)

    def block_server(sink: BlockSink) -> BlockServer:
        return ZmqBlockServer(config.block_listen, sink, advertise=config.block_advertise)

    sender = ZmqBlockSender(buffer_bytes=config.buffer_bytes, timeout_s=config.transfer_timeout_s)
    service = build_service(config, model=model, sender=sender, server_factory=block_server, metrics=metrics)
    stack.push_async_callback(lambda: close_within(_CLOSE_TIMEOUT_S, "prefill service", service.close()))
    await service.start()
    metrics_server = serve_metrics(metrics.registry, config.metrics_listen, is_ready=lambda: service.is_ready)
    stack.callback(metrics_server.close)
    control = await serve_control(listen=config.listen, prefill=service)
    stack.push_async_callback(lambda: control.close(config.shutdown_timeout_s))
    return {
        "service": "prefill",
        "address": control.address,
        "metrics": metrics_server.address,
        "blocks": service.block_endpoint,
    }
