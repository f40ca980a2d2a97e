"""The decode service's options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from kvferry.shared.config import WorkerSettings

if TYPE_CHECKING:
    import torch

_CPU_ARENA_BYTES = 1 << 30
_CUDA_ARENA_FRACTION = 0.5


class DecodeConfig(WorkerSettings):
    """`kvferry decode`, environment `KVFERRY_*`."""

    arena_bytes: int = Field(
        0,
        ge=0,
        description="bytes for KV of all sequences; 0: 1 GiB on CPU, on CUDA half of what is free once the "
        "model is loaded",
    )
    max_batch_size: int = Field(32, ge=1, description="sequences that decode together in one step")
    max_waiting: int = Field(
        64, ge=0, description="requests that may wait for arena memory; one more is refused (queue_full)"
    )
    admission_wait_s: float = Field(
        10.0, ge=0, description="how long a request waits for arena memory before it is refused (arena_full)"
    )
    lease_s: float = Field(
        120.0, gt=0, description="a reservation whose transfer is not complete by then is freed"
    )
    credit_bytes: int = Field(
        32 << 20, ge=1, description="block bytes that a sender may have in flight to this worker"
    )
    retain_s: float = Field(
        300.0,
        ge=0,
        description="how long a session's rows stay after a turn, so that the next one brings only new ones; "
        "0: they do not",
    )
    sweep_interval_s: float = Field(0.25, gt=0, description="how often expired leases are looked for")
    history_timeout_s: float = Field(
        30.0, gt=0, description="how long returning one turn's generated KV may take"
    )
    history_threads: int = Field(2, ge=1, description="turns whose generated KV is returned at a time")
    send_buffer_bytes: int = Field(64 << 20, ge=1, description="host memory for blocks being returned")
    heartbeat_timeout_s: float = Field(
        30.0, gt=0, description="the worker is not ready when its engine has not come round for so long"
    )


def arena_size_bytes(config: DecodeConfig, device: torch.device) -> int:
    """The arena's size on this device; see `DecodeConfig.arena_bytes`."""
    if config.arena_bytes:
        return config.arena_bytes
    if device.type == "cuda":
        # Here, because commands that only read options should not wait seconds for torch.
        import torch

        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * _CUDA_ARENA_FRACTION)
    return _CPU_ARENA_BYTES
