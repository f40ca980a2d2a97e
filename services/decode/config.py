"""The decode service's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.process.config import WorkerSettings
from kvferry.shared.process.options import CAPACITY, HISTORY, PROCESS, TIMEOUTS, Bytes, Seconds

if TYPE_CHECKING:
    import torch

_CPU_ARENA_BYTES = 1 << 30
_CUDA_ARENA_FRACTION = 0.5
GROWTH_TOKENS = 64
"""Tokens for which a sequence has room at first, at least, and by which it grows, at least."""


class DecodeConfig(WorkerSettings):
    """Options of `kvferry decode`; see `WorkerSettings` for the rest."""

    arena_bytes: Annotated[Bytes, CAPACITY] = Field(
        0,
        ge=0,
        description="memory for the KV of all sequences, of all ranks together; 0: 1GiB on CPU, on CUDA half "
        "of what is free after the model is loaded",
    )
    max_batch_size: Annotated[int, CAPACITY] = Field(
        32, ge=1, description="sequences that decode together in one step"
    )
    max_waiting: Annotated[int, CAPACITY] = Field(
        64, ge=0, description="requests that may wait for arena memory; more are refused (queue_full)"
    )
    admission_wait_s: Annotated[Seconds, TIMEOUTS] = Field(
        10.0, ge=0, description="how long a request waits for arena memory before it is refused (arena_full)"
    )
    elastic_budget: Annotated[bool, CAPACITY] = Field(
        False,
        description="when arena memory is short, serve a request that states a min_token_budget with a "
        "smaller budget, down to that, instead of letting it wait",
    )
    lease_s: Annotated[Seconds, TIMEOUTS] = Field(
        120.0, gt=0, description="how long a reservation without a prompt outlives its router's last sign"
    )
    credit_bytes: Annotated[Bytes, CAPACITY] = Field(
        32 << 20, ge=1, description="block bytes that a sender may have in flight to this worker"
    )
    retain_s: Annotated[Seconds, HISTORY] = Field(
        300.0,
        ge=0,
        description="how long a session's KV is retained after a turn, so that the next turn ships only what "
        "is new; 0 disables retention",
    )
    history_timeout_s: Annotated[Seconds, HISTORY] = Field(
        10.0, gt=0, description="how long returning one turn's generated KV may take"
    )
    history_threads: Annotated[int, HISTORY] = Field(
        2, ge=1, description="turns whose generated KV is returned to one prefill worker at the same time"
    )
    send_buffer_bytes: Annotated[Bytes, CAPACITY] = Field(
        64 << 20, ge=2, description="host memory for blocks on return; one prefill worker's may take half"
    )
    shadow_check: Annotated[int, PROCESS] = Field(
        0,
        ge=0,
        description="every so many steps, one sequence's logits are compared with those of the torch path, "
        "and kernels that differ are not used any more; such a step takes several times as long; 0: never",
    )
    heartbeat_timeout_s: Annotated[Seconds, TIMEOUTS] = Field(
        30.0, gt=0, description="not ready once the engine's loop has made no iteration for this long"
    )


def check_arena(config: DecodeConfig, least: int) -> None:
    """Check that a sequence has room. Args: least: bytes that GROWTH_TOKENS tokens take at least.

    Raises: ConfigurationError.
    """
    if 0 < config.arena_bytes < least:
        raise ConfigurationError(
            f"arena_bytes is {config.arena_bytes}; it must be at least {least}, which {GROWTH_TOKENS} tokens "
            "of this model take, and more for long prompts"
        )


def arena_size_bytes(config: DecodeConfig, device: torch.device, *, num_ranks: int) -> int:
    """Return the size of one rank's arena; see `DecodeConfig.arena_bytes`."""
    if config.arena_bytes:
        return config.arena_bytes // num_ranks
    if device.type == "cuda":
        # Imported here: reading options should not wait seconds for torch.
        import torch

        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * _CUDA_ARENA_FRACTION)
    return _CPU_ARENA_BYTES // num_ranks
