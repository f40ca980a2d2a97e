"""The prefill service's options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvferry.shared.process.config import HistoryBits, StoredSettings, WorkerSettings
from kvferry.shared.process.options import CAPACITY, COMPRESSION, HISTORY, TIMEOUTS, Bytes, Seconds


class PrefillConfig(WorkerSettings, StoredSettings):
    """Options of `kvferry prefill`; see `WorkerSettings` and `StoredSettings` for the rest."""

    calibrate: Annotated[bool, COMPRESSION] = Field(
        False,
        description="before serving, do what kvferry calibrate does if the calibration folder has nothing of "
        "the model; takes minutes",
    )
    history_bytes: Annotated[Bytes, HISTORY] = Field(
        0,
        ge=0,
        description="host memory for the KV history of sessions; 0: a quarter of what is available at the "
        "start, within a container's limit",
    )
    history_bits: Annotated[HistoryBits, HISTORY] = Field(
        "model", description="bits per value of stored history; model: as computed. Fewer cost accuracy"
    )
    history_redis_bytes: Annotated[Bytes, HISTORY] = Field(
        0, ge=0, description="limit on history in Redis; 0: no limit"
    )
    history_disk: Annotated[str, HISTORY] = Field(
        "", description="folder that also stores history and outlives the worker; empty: none"
    )
    history_disk_bytes: Annotated[Bytes, HISTORY] = Field(
        0, ge=0, description="limit on history in the folder; 0: nothing is stored there"
    )
    history_ttl_s: Annotated[Seconds, HISTORY] = Field(
        86_400.0, gt=0, description="how long history stays on disk and in Redis after a session's last turn"
    )
    turn_lease_s: Annotated[Seconds, HISTORY] = Field(
        60.0, gt=0, description="how long a staged turn stays without progress or a sign of its router"
    )
    max_waiting: Annotated[int, CAPACITY] = Field(
        64, ge=1, description="requests that may wait for the engine; more are refused"
    )
    transfer_timeout_s: Annotated[Seconds, TIMEOUTS] = Field(
        30.0, gt=0, description="how long a decode worker may be silent, or the send buffer full"
    )
    buffer_bytes: Annotated[Bytes, CAPACITY] = Field(
        1 << 30, ge=1, description="host memory for blocks that are not acknowledged yet, of all ranks"
    )
