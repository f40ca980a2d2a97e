"""Builds the prefill service from its options, for its own process or for a combined one."""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import CollectorRegistry

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.history import build_store
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.worker import BlockTransport, run_worker


async def run(config: PrefillConfig) -> None:
    """Serve until SIGINT or SIGTERM; see `run_worker`."""
    await run_worker(config, "prefill", partial(build_service, config))


async def build_service(
    config: PrefillConfig, model: LanguageModel, transport: BlockTransport
) -> tuple[PrefillService, CollectorRegistry]:
    """The service with its history store, and its metrics; see `shared.worker.Build`."""
    metrics = PrefillMetrics()
    service = PrefillService(
        model=model,
        store=build_store(config, spec=model.spec, metrics=metrics),
        sender=transport.sender(buffer_bytes=config.buffer_bytes, timeout_s=config.transfer_timeout_s),
        server_factory=transport.server,
        metrics=metrics,
        config=config,
        clock=time.monotonic,
    )
    return service, metrics.registry
