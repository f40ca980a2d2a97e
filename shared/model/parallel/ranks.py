"""One rank of a tensor-parallel worker: a process with a part of every layer's weights and heads.

    lead       a worker's own process: engine, scheduler, sampler, wire, KV       (`lead.py`)
    followers  its child processes: they run the same passes over their own parts (`follower.py`)

Tensors go through `torch.distributed`: NCCL between GPUs, gloo on a CPU. Words go through pipes, because a
rank may wait any length of time for the next one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvferry.shared.errors import ConfigurationError

_COLLECTIVE_TIMEOUT = timedelta(seconds=120)
"""Ranks reach an exchange at about the same time. One that has stopped is noticed sooner (`lead.py`)."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """Join the group. Attributes: store: file by which the ranks find one another; num_threads: for torch."""

    rank: int
    num_ranks: int
    store: str
    backend: str
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call a method; see `FollowingRank.target`. Attributes: is_answered: with its result, or its error."""

    name: str
    args: tuple[Any, ...]
    is_answered: bool = False


class Word(Enum):
    """Sent to followers that wait within a pass: the lead has finished its own work, or the pass is over
    because that work failed or was cancelled."""

    PROCEED = "proceed"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A follower's note of what it wants to be told at once. The answer has the same number."""

    number: int
    content: object


class Ranks:
    """A rank's view of its group.

    Attributes: rank: 0 leads.
    """

    def __init__(self, join: Join) -> None:
        self.rank = join.rank
        self.num_ranks = join.num_ranks
        self._join = join

    @property
    def device(self) -> torch.device:
        """The device of this rank's part of the model."""
        return torch.device("cuda", self.rank) if self._join.backend == "nccl" else torch.device("cpu")

    def join(self) -> None:
        """Join the group; return when all ranks have. The device must not have been used before."""
        # All ranks are on this machine. Otherwise the libraries listen on an address that others may reach.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        if self._join.backend == "nccl":
            torch.cuda.set_device(self.rank)
        torch.set_num_threads(self._join.num_threads)
        dist.init_process_group(
            self._join.backend,
            init_method=f"file://{self._join.store}",
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=self.device if self._join.backend == "nccl" else None,
        )

    def loaded(self) -> None:
        """Announce that this rank has its weights; return when all have.

        Raises: ConfigurationError: another rank has not.
        """
        raise NotImplementedError

    def proceed(self) -> None:
        """Let the others go on, in the lead. Followers wait for that, and run other passes meanwhile.

        Raises: PassAborted: in followers, the lead has given up the pass.
        """
        raise NotImplementedError

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the lead's tensor into the others'. All are contiguous and of the same shape."""
        dist.broadcast(tensor, src=0)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Gather the parts of all ranks, of the same shape; none in followers."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.num_ranks)] if self.rank == 0 else []
        dist.gather(part, parts or None, dst=0)
        return parts

    def scatter(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Receive this rank's part. Args: parts: of all ranks; empty in followers. like: has its shape."""
        part = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.scatter(part, [tensor.contiguous() for tensor in parts] or None, src=0)
        return part


def backend_for(device: str, num_ranks: int) -> str:
    """Return the backend of `torch.distributed` for ranks on a device.

    Raises: ConfigurationError: the device does not support so many ranks.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(
            f"device is {device!r} with tensor_parallel {num_ranks}; it must be auto, cpu or cuda: rank i "
            "has GPU i (choose GPUs by CUDA_VISIBLE_DEVICES)"
        )
    num_devices = torch.cuda.device_count()
    if device == "cpu" and num_devices:
        raise ConfigurationError(
            f"device is 'cpu' with tensor_parallel {num_ranks}, and this process sees {num_devices} GPUs, "
            'which transformers would use; set CUDA_VISIBLE_DEVICES=""'
        )
    if device == "cpu" or (device == "auto" and not num_devices):
        return "gloo"
    if num_devices < num_ranks:
        raise ConfigurationError(
            f"tensor_parallel is {num_ranks}, and there are {num_devices} CUDA devices; it must be at "
            "most so many"
        )
    return "nccl"
