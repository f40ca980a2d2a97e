"""The history store that a prefill worker's settings ask for: host memory, or host memory over Redis.

Wires; decides nothing.
"""

from __future__ import annotations

import time

import torch

from kvferry.services.prefill.config import PrefillConfig
from kvferry.shared.history.interface import HistoryStore
from kvferry.shared.history.memory import MemoryHistoryStore
from kvferry.shared.history.precision import RowPrecision
from kvferry.shared.history.redis_client import RedisLink, RedisOptions
from kvferry.shared.history.redis_format import RowShape
from kvferry.shared.history.redis_history import RedisHistory
from kvferry.shared.history.redis_quota import RedisQuota
from kvferry.shared.history.tiered import TieredHistoryStore
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.spec import ModelSpec

_WRITE_TIMEOUT_S = 8.0
"""Less than the router waits for a commit."""


def build_store(config: PrefillConfig, *, spec: ModelSpec, metrics: PrefillMetrics) -> HistoryStore:
    """The caller closes it. Raises: ConfigurationError: `history_redis` is no URL of Redis."""

    def count_miss(reason: str) -> None:
        metrics.history_miss.labels(reason).inc()

    precision = RowPrecision(bits=config.history_bits, dtype=getattr(torch, spec.dtype))
    memory = MemoryHistoryStore(
        max_bytes=config.history_bytes,
        num_layers=spec.num_layers,
        turn_lease_s=config.turn_lease_s,
        clock=time.monotonic,
        precision=precision,
        # Over Redis, what memory lacks is not missing yet.
        on_miss=(lambda reason: None) if config.history_redis else count_miss,
    )
    if not config.history_redis:
        return memory
    return TieredHistoryStore(
        memory,
        build_redis(config, spec=spec, precision=precision),
        write_mode=config.history_write,
        turn_timeout_s=config.history_redis_turn_timeout_s,
        write_timeout_s=_WRITE_TIMEOUT_S,
        on_miss=count_miss,
        on_failure=lambda reason: metrics.history_store_failed.labels(reason).inc(),
        clock=time.monotonic,
    )


def build_redis(config: PrefillConfig, *, spec: ModelSpec, precision: RowPrecision) -> RedisHistory:
    """The Redis tier; connects when first used."""
    link = RedisLink(
        RedisOptions(
            url=config.history_redis,
            timeout_s=config.history_redis_timeout_s,
            breaker_open_s=config.history_redis_retry_s,
        )
    )
    quota = RedisQuota(
        link,
        max_bytes=config.history_redis_bytes,
        owner_max_bytes=config.history_redis_key_bytes,
        ttl_s=config.history_ttl_s,
    )
    shape = RowShape(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        precision=precision,
    )
    return RedisHistory(link, quota, shape=shape, fingerprint=spec.fingerprint, ttl_s=config.history_ttl_s)
