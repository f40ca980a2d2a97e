"""Builds the decode service from its options, for its own process or for a combined one."""

from __future__ import annotations

import asyncio
from functools import partial

from prometheus_client import CollectorRegistry

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.parts import DECODE_RANK
from kvferry.services.decode.service import DecodeService
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.serving import end_process
from kvferry.shared.process.worker import BlockTransport, RankTransport, run_worker
from kvferry.shared.telemetry.metrics import DecodeMetrics
from kvferry.shared.wire.sender import BlockSender


async def run(config: DecodeConfig) -> None:
    """Serve until SIGINT or SIGTERM; see `run_worker`."""
    await run_worker(config, "decode", partial(build_service, config), follower_class=DECODE_RANK)


async def build_service(
    config: DecodeConfig, model: LanguageModel, transport: BlockTransport
) -> tuple[DecodeService, CollectorRegistry]:
    """The service and its metrics; see `shared.worker.Build`."""
    metrics = DecodeMetrics()
    service = DecodeService(
        config,
        model=model,
        tokenizer=await asyncio.to_thread(ChatTokenizer.load, config.model),
        metrics=metrics,
        on_device_lost=end_process,
        rank_transport=RankTransport.of(config, "decode"),
        server_factory=partial(transport.server, on_late_block=metrics.late_blocks.inc),
        sender=BlockSender(
            transport.connecting(lambda transport: metrics.block_connections.labels(transport).inc()),
            buffer_bytes=config.send_buffer_bytes,
            peer_bytes=config.send_buffer_bytes // 2,
            timeout_s=config.history_timeout_s,
        ),
    )
    return service, service.registry
