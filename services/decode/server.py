"""Builds the decode service from its options, for its own process or for a combined one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.services.decode.config import GROWTH_TOKENS, DecodeConfig, check_arena
from kvferry.services.decode.parts import DECODE_RANK
from kvferry.services.decode.service import DecodeService
from kvferry.shared.cache.arena import ByteArena
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
    """Build the service and its metrics; see `shared.worker.Build`. Raises: ConfigurationError."""
    check_arena(config, model.spec.full_bytes(GROWTH_TOKENS))
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
    return service, ArenaRegistry(metrics, service.arena, model.num_ranks)


class ArenaRegistry(CollectorRegistry):
    """Collects a decode worker's metrics, and the bytes by the arena's states under its lock: in one response
    they always sum to its size. Args: num_ranks: each has an arena like this."""

    def __init__(self, metrics: DecodeMetrics, arena: ByteArena, num_ranks: int) -> None:
        super().__init__()
        self._metrics = metrics
        self._arena = arena
        self._num_ranks = num_ranks

    def register(self, collector: Collector) -> None:
        """Have the metrics' registry collect it, too."""
        self._metrics.registry.register(collector)

    def collect(self) -> Iterable[Metric]:
        with self._arena.lock:
            for state, size_bytes in self._arena.bytes_by_state().items():
                self._metrics.arena_bytes.labels(state).set(size_bytes * self._num_ranks)
            return list(self._metrics.registry.collect())
