"""Builds the prefill service from its options, for its own process or for a combined one."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import structlog
import torch
from prometheus_client import CollectorRegistry

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.parts import PREFILL_RANK, PrefillRanks
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.history.disk_history import DiskHistory
from kvferry.shared.history.host_memory import available_memory_bytes
from kvferry.shared.history.redis_client import RedisLink, RedisOptions
from kvferry.shared.history.redis_history import RedisHistory
from kvferry.shared.history.redis_quota import RedisQuota
from kvferry.shared.history.rows import RowPrecision
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.stored_format import StoredShape
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.serving import end_process
from kvferry.shared.process.worker import BlockTransport, Calibrate, run_worker
from kvferry.shared.telemetry.metrics import PrefillMetrics
from kvferry.shared.trust.at_rest import AtRestKeys
from kvferry.shared.wire.sender import BlockSender

_MEMORY_SHARE = 4
_COMMIT_TIMEOUT_S = 8.0
"""How long a commit waits for Redis. Less than the router waits for a commit."""
_TURN_TIMEOUTS = 5.0
"""How long a turn waits for rows from Redis in total, as a multiple of one call's timeout."""
_DISK_TURN_TIMEOUT_S = 30.0
"""How long a turn waits for rows from disk in total."""

log = structlog.get_logger(__name__)


async def run(config: PrefillConfig, calibrate: Calibrate | None = None) -> None:
    """Serve until SIGINT or SIGTERM; see `run_worker`."""
    build = partial(build_service, config)
    await run_worker(config, "prefill", build, follower_class=PREFILL_RANK, calibrate=calibrate)


async def build_service(
    config: PrefillConfig, model: LanguageModel, transport: BlockTransport
) -> tuple[PrefillService, CollectorRegistry]:
    """Build the service with its history store, and its metrics; see `shared.worker.Build`."""
    metrics = PrefillMetrics()
    sender = BlockSender(
        transport.connecting(lambda transport: metrics.block_connections.labels(transport).inc()),
        buffer_bytes=max(1, config.buffer_bytes // model.num_ranks),
        timeout_s=config.transfer_timeout_s,
    )
    service = PrefillService(
        model=model,
        store=build_store(config, spec=model.spec, metrics=metrics),
        ranks=PrefillRanks(model, sender),
        server_factory=transport.server,
        metrics=metrics,
        config=config,
        clock=time.monotonic,
        on_device_lost=end_process,
    )
    return service, metrics.registry


def build_store(config: PrefillConfig, *, spec: ModelSpec, metrics: PrefillMetrics) -> HistoryStore:
    """Build the history store: host memory, with or without disk and Redis. The caller closes it.

    Raises: ConfigurationError: `history_redis` is not a Redis URL, `history_disk` not a usable folder, or
        `at_rest_keys` not a file of keys.
    """

    def count_failure(reason: str) -> None:
        metrics.history_store_failed.labels(reason).inc()

    shape = StoredShape(
        fingerprint=spec.fingerprint,
        heads=tuple(map(spec.heads, spec.row_layers)),
        precision=RowPrecision(
            bits=config.history_bits, dtype=getattr(torch, spec.dtype), latent_dim=spec.latent_dim
        ),
        states={layer: spec.layers[layer].state for layer in spec.state_layers},
        keys=AtRestKeys.read(config.at_rest_keys),
    )
    store = HistoryStore(
        max_bytes=config.history_bytes or available_memory_bytes() // _MEMORY_SHARE,
        num_layers=len(spec.row_layers),
        num_states=len(spec.state_layers),
        turn_lease_s=config.turn_lease_s,
        clock=time.monotonic,
        precision=shape.precision,
        on_miss=lambda reason: metrics.history_miss.labels(reason).inc(),
    )
    if config.history_disk and not config.history_disk_bytes:
        log.warning("history is not stored on disk", history_disk=config.history_disk, history_disk_bytes=0)
    if config.history_disk and config.history_disk_bytes:
        disk = DiskHistory(
            Path(config.history_disk),
            max_bytes=config.history_disk_bytes,
            shape=shape,
            ttl_s=config.history_ttl_s,
        )
        # A commit does not wait for the disk: it is written behind.
        store.add_tier(
            disk, turn_timeout_s=_DISK_TURN_TIMEOUT_S, commit_timeout_s=0.0, on_failure=count_failure
        )
    if config.history_redis:
        link = RedisLink(RedisOptions(url=config.history_redis, timeout_s=config.history_redis_timeout_s))
        quota = RedisQuota(link, max_bytes=config.history_redis_bytes, ttl_s=config.history_ttl_s)
        store.add_tier(
            RedisHistory(link, quota, shape=shape, ttl_s=config.history_ttl_s),
            turn_timeout_s=_TURN_TIMEOUTS * config.history_redis_timeout_s,
            commit_timeout_s=_COMMIT_TIMEOUT_S,
            on_failure=count_failure,
        )
    for tier, num_waiting in store.tier_waiting.items():
        metrics.history_waiting.labels(tier).set_function(num_waiting)
    return store
