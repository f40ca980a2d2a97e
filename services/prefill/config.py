"""Options of the prefill service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvferry.shared.config import HistoryBits, WorkerSettings


class PrefillConfig(WorkerSettings):
    """Settings of one prefill worker; see `WorkerSettings` for the rest."""

    history_bytes: int = Field(4 << 30, ge=0, description="host memory for sessions' KV history, in bytes")
    history_bits: HistoryBits = Field(
        "model",
        description="how history is stored: model (as computed), 16, 8 or 4 bits; fewer cost accuracy",
    )
    history_redis: str = Field(
        "", repr=False, description="URL of the Redis behind host memory; empty keeps history in memory alone"
    )
    history_redis_timeout_s: float = Field(
        2.0, gt=0, description="when a call of Redis counts as failed, in seconds"
    )
    history_redis_turn_timeout_s: float = Field(
        10.0, gt=0, description="a turn that waited so long for rows from Redis computes them instead"
    )
    history_redis_retry_s: float = Field(
        5.0, gt=0, description="a Redis that does not answer is left alone for so long"
    )
    history_redis_bytes: int = Field(0, ge=0, description="bound on history in Redis, in bytes; 0: no bound")
    history_redis_key_bytes: int = Field(
        0, ge=0, description="bound on one API key's history in Redis, in bytes; 0: no bound"
    )
    history_ttl_s: float = Field(
        86_400.0, gt=0, description="history in Redis is gone after so long without a turn"
    )
    history_write: Literal["through", "behind"] = Field(
        "through", description="a turn's end waits for Redis (through, a bounded time) or does not (behind)"
    )
    history_choice: Literal["cost", "reuse"] = Field(
        "cost",
        description="what a turn does with history: the way that was measured to cost least (cost), or load "
        "whatever is held (reuse)",
    )
    history_cost_half_life_s: float = Field(
        120.0, gt=0, description="measured costs count half after so long; then the standing order is tried"
    )
    turn_lease_s: float = Field(
        1800.0, gt=0, description="a turn's staged history is dropped after so long without progress"
    )
    sweep_interval_s: float = Field(1.0, gt=0, description="how often expired turns are looked for")
    max_waiting: int = Field(64, ge=1, description="requests that may wait for the engine; more are refused")
    transfer_timeout_s: float = Field(
        30.0, gt=0, description="how long a decode worker may be silent, or the send buffer full"
    )
    buffer_bytes: int = Field(
        1 << 30, ge=1, description="host memory for blocks sent and not acknowledged, over all transfers"
    )
    history_credit_bytes: int = Field(
        64 << 20, ge=1, description="bytes in flight that a decode worker may send back of one turn"
    )
    delta_index_bytes: int = Field(
        256 << 20,
        ge=0,
        description="host memory for which rows each session's decode worker was last sent, so that a turn "
        "ships only new ones; 0: every turn ships all",
    )
    probe_interval_s: float = Field(
        30.0, gt=0, description="an idle engine runs one token so often, to know that it works"
    )
    ready_timeout_s: float = Field(
        120.0, gt=0, description="not ready if the engine has finished no layer and no probe for so long"
    )
