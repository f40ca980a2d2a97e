"""The prefill worker as a process: loads the model, serves control, blocks and metrics until a signal.

`build_service` makes the service over given transports, for one process that runs all services.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.history import build_store
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.control.server import serve_control
from kvferry.shared.kernel_paths import KernelCalls
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.serving import Announce, close_within, serve_metrics
from kvferry.shared.wire.interfaces import BlockSender, BlockServer, BlockSink
from kvferry.shared.wire.zmq import ZmqBlockSender, ZmqBlockServer
from kvferry.shared.worker import run_worker

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
        sender: ships blocks to decode workers; the service closes it.
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
    """Serve until SIGINT or SIGTERM; see `run_worker`."""
    await run_worker(config, "prefill", partial(_start, config), announce)


async def _start(config: PrefillConfig, model: LanguageModel, stack: AsyncExitStack) -> dict[str, str]:
    """Start everything, leaving its closing on the stack; returns the addresses."""
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
