"""The decode worker's process: loads the model, listens for control and blocks, serves metrics till a signal.

Wires; decides nothing. `build_service` is for whoever brings transports of its own, such as one process that
holds all services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.service import DecodeService
from kvferry.shared.control.server import serve_control
from kvferry.shared.kernel_paths import KernelCalls
from kvferry.shared.metrics import DecodeMetrics
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.location import resolve_model_path
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.serving import Announce, close_within, serve_metrics
from kvferry.shared.wire.interfaces import BlockSender, BlockServer, BlockSink
from kvferry.shared.wire.zmq import ZmqBlockSender, ZmqBlockServer
from kvferry.shared.worker import run_worker

_CLOSE_TIMEOUT_S = 30.0


def build_service(
    config: DecodeConfig,
    *,
    model: LanguageModel,
    tokenizer: ChatTokenizer,
    sender: BlockSender,
    server_factory: Callable[[BlockSink], BlockServer],
    metrics: DecodeMetrics,
) -> DecodeService:
    """A service that its caller starts and closes.

    Args:
        model: not shared with anything that runs at the same time.
        sender: ships generated KV back to prefill workers; closed with the service.
        server_factory: makes the block server, at the service's start. It may report late blocks to
            `metrics.late_blocks`; failed transfers are counted by the service itself.
    """
    return DecodeService(
        config,
        model=model,
        tokenizer=tokenizer,
        metrics=metrics,
        server_factory=server_factory,
        sender=sender,
    )


async def run(config: DecodeConfig, announce: Announce | None = None) -> None:
    """Serve until SIGINT or SIGTERM; see `run_worker`."""
    await run_worker(config, "decode", partial(_start, config), announce)


async def _start(config: DecodeConfig, model: LanguageModel, stack: AsyncExitStack) -> dict[str, str]:
    """Start everything, leaving its closing on the stack; returns the addresses."""
    tokenizer = await asyncio.to_thread(
        lambda: ChatTokenizer.load(resolve_model_path(config.model, weights=False))
    )
    metrics = DecodeMetrics()
    KernelCalls("decode", model.device).register(metrics.registry)

    def block_server(sink: BlockSink) -> BlockServer:
        return ZmqBlockServer(
            config.block_listen,
            sink,
            advertise=config.block_advertise,
            on_late_block=metrics.late_blocks.inc,
        )

    service = build_service(
        config,
        model=model,
        tokenizer=tokenizer,
        sender=ZmqBlockSender(buffer_bytes=config.send_buffer_bytes, timeout_s=config.history_timeout_s),
        server_factory=block_server,
        metrics=metrics,
    )
    stack.push_async_callback(lambda: close_within(_CLOSE_TIMEOUT_S, "decode service", service.close()))
    await service.start()
    metrics_server = serve_metrics(service.registry, config.metrics_listen, is_ready=lambda: service.is_ready)
    stack.callback(metrics_server.close)
    control = await serve_control(listen=config.listen, decode=service)
    stack.push_async_callback(lambda: control.close(config.shutdown_timeout_s))
    return {
        "service": "decode",
        "address": control.address,
        "metrics": metrics_server.address,
        "blocks": service.block_endpoint,
    }
