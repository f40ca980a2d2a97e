"""Options of the prefill service."""

from __future__ import annotations

from pydantic import Field

from kvferry.shared.config import WorkerSettings


class PrefillConfig(WorkerSettings):
    """Settings of one prefill worker; see `WorkerSettings` for the rest."""

    history_bytes: int = Field(4 << 30, ge=0, description="host memory for sessions' KV history, in bytes")
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
    probe_interval_s: float = Field(
        30.0, gt=0, description="an idle engine runs one token so often, to know that it works"
    )
    ready_timeout_s: float = Field(
        120.0, gt=0, description="not ready if the engine has finished no layer and no probe for so long"
    )
