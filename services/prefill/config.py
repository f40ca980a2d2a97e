"""Options of the prefill service."""

from __future__ import annotations

from pydantic import Field

from kvferry.shared.config import HistoryBits, WorkerSettings


class PrefillConfig(WorkerSettings):
    """Settings of one prefill worker; see `WorkerSettings` for the rest."""

    history_bytes: int = Field(4 << 30, ge=0, description="host memory for sessions' KV history, in bytes")
    history_bits: HistoryBits = Field(
        "model",
        description="precision of stored history: model (as computed), 16, 8 or 4 bits; fewer cost accuracy",
    )
    history_redis: str = Field(
        "", repr=False, description="URL of a Redis that also stores history; empty: host memory only"
    )
    history_redis_timeout_s: float = Field(
        2.0, gt=0, description="timeout of one Redis call, in seconds; a turn waits at most five times that"
    )
    history_redis_bytes: int = Field(0, ge=0, description="limit on history in Redis, in bytes; 0: no limit")
    history_ttl_s: float = Field(
        86_400.0, gt=0, description="how long history stays in Redis after a session's last turn, in seconds"
    )
    turn_lease_s: float = Field(
        1800.0, gt=0, description="how long a staged turn may go without progress before it is dropped"
    )
    max_waiting: int = Field(64, ge=1, description="how many requests may wait for the engine")
    transfer_timeout_s: float = Field(
        30.0, gt=0, description="how long a decode worker may be silent, or the send buffer full, in seconds"
    )
    buffer_bytes: int = Field(
        1 << 30, ge=1, description="host memory for blocks sent and not yet acknowledged, in bytes"
    )
    probe_interval_s: float = Field(
        30.0, gt=0, description="how often an idle engine runs one token to show that it works, in seconds"
    )
    ready_timeout_s: float = Field(
        120.0, gt=0, description="not ready if no layer and no probe has finished for this long, in seconds"
    )
