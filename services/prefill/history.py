"""Builds a prefill worker's history store from its options: host memory, with or without Redis."""

from __future__ import annotations

import time

import torch

from kvferry.services.prefill.config import PrefillConfig
from kvferry.shared.history.redis_client import RedisLink, RedisOptions
from kvferry.shared.history.redis_format import RowShape
from kvferry.shared.history.redis_history import RedisHistory
from kvferry.shared.history.redis_quota import RedisQuota
from kvferry.shared.history.rows import RowPrecision
from kvferry.shared.history.store import HistoryStore, StoreOptions
from kvferry.shared.history.tiered import TieredHistoryStore
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.spec import ModelSpec

_COMMIT_TIMEOUT_S = 8.0
"""How long a commit waits for Redis. Less than the router waits for a commit."""
_TURN_TIMEOUTS = 5.0
"""How long a turn waits for rows from Redis in total, as a multiple of one call's timeout."""


def build_store(config: PrefillConfig, *, spec: ModelSpec, metrics: PrefillMetrics) -> HistoryStore:
    """The caller closes it. Raises: ConfigurationError: `history_redis` is not a Redis URL."""

    def count_miss(reason: str) -> None:
        metrics.history_miss.labels(reason).inc()

    precision = RowPrecision(bits=config.history_bits, dtype=getattr(torch, spec.dtype))
    memory: StoreOptions = {
        "max_bytes": config.history_bytes,
        "num_layers": spec.num_layers,
        "turn_lease_s": config.turn_lease_s,
        "clock": time.monotonic,
        "precision": precision,
        "on_miss": count_miss,
    }
    if not config.history_redis:
        return HistoryStore(**memory)
    link = RedisLink(RedisOptions(url=config.history_redis, timeout_s=config.history_redis_timeout_s))
    shape = RowShape(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        precision=precision,
    )
    quota = RedisQuota(link, max_bytes=config.history_redis_bytes, ttl_s=config.history_ttl_s)
    return TieredHistoryStore(
        RedisHistory(link, quota, shape=shape, fingerprint=spec.fingerprint, ttl_s=config.history_ttl_s),
        turn_timeout_s=_TURN_TIMEOUTS * config.history_redis_timeout_s,
        commit_timeout_s=_COMMIT_TIMEOUT_S,
        on_failure=lambda reason: metrics.history_store_failed.labels(reason).inc(),
        **memory,
    )
