"""What the leading rank of a decode worker tells the others about their parts of its sequences' KV.

The leading rank alone decides. The others have memory as large as its arena, and everything is at the same
offsets in it. They do what they are told in order, so that a range is never written for two sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.shared.cache.delta import Positions, RetainedRows, RowNumbers
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.wire.messages import TransferKey

if TYPE_CHECKING:
    from kvferry.shared.worker import RankTransport


@dataclass(frozen=True, kw_only=True)
class SentTensor:
    """A tensor in a message: its bytes, because ranks share no memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


SentLayer = Mapping[str, SentTensor]


def sent(tensors: Tensors) -> SentLayer:
    """Args: tensors: on the host."""
    return {
        name: SentTensor(
            dtype=its.dtype,
            shape=tuple(its.shape),
            data=its.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, its in tensors.items()
    }


def received(tensors: SentLayer) -> dict[str, Tensor]:
    """The tensors that were sent, on the host."""
    return {name: _tensor(its) for name, its in tensors.items()}


def _tensor(its: SentTensor) -> Tensor:
    if not its.data:
        return torch.empty(its.shape, dtype=its.dtype)
    return torch.frombuffer(bytearray(its.data), dtype=its.dtype).view(its.shape)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A range of the arena."""

    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Start:
    """Take memory; forget everything from before. Answered."""

    arena_bytes: int
    max_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Take the blocks of the rank's heads. Answered with the endpoint, or an error.

    Attributes: transport: makes the rank's block server.
    """

    transport: RankTransport


@dataclass(frozen=True, kw_only=True)
class Expect:
    """A reservation was made.

    Attributes:
        key: the transfer's; its id names the sequence from now on.
        resolved: the reservation's plan; room: the new tokens for which there is room.
        retained: the transfers whose rows this one may leave out, newest first, and below which token.
    """

    key: TransferKey
    place: Place
    resolved: ResolvedPlan
    room: int
    returns_generated: bool
    retained: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PartArrived:
    """Noted by a rank: all blocks of its heads are there.

    Attributes:
        key: the reservation's.
        layer_rows: as of the part's manifest.
        prompt_bytes: of the rank's part of the prompt's cache.
        positions: as of `Sequence`, of the rank's heads.
    """

    key: TransferKey
    layer_rows: tuple[int, ...]
    prompt_bytes: int
    positions: tuple[Positions | None, ...]


@dataclass(frozen=True, kw_only=True)
class PartFailed:
    """Noted by a rank: the transfer of its part has failed. Attributes: nack: see `encode_nack`."""

    key: TransferKey
    nack: bytes


@dataclass(frozen=True)
class LateBlock:
    """Noted by a rank: a block without a current reservation has arrived there, and was dropped."""


@dataclass(frozen=True, kw_only=True)
class IsAwaited:
    """Asked by a rank that has not been told of a transfer: whether a reservation with this key waits for its
    blocks. Answered with a bool."""

    key: TransferKey


@dataclass(frozen=True, kw_only=True)
class Move:
    """Copy a sequence to other memory. Attributes: place: None: to the host."""

    sequence: int
    place: Place | None
    plan: ResolvedPlan


@dataclass(frozen=True, kw_only=True)
class Share:
    """Copy a sequence's prompt to the host for its siblings. Its name is the sequence's."""

    sequence: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Begin a sequence with a copy of a shared prompt. Attributes: prompt: its name."""

    prompt: int
    sequence: int
    place: Place
    plan: ResolvedPlan
    returns_generated: bool


@dataclass(frozen=True, kw_only=True)
class Retain:
    """A sequence has ended; its rows stay, under its name. Attributes: rows: of the rank's heads."""

    sequence: int
    rows: RetainedRows


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """Copy some of the retained rows to other memory.

    Attributes: rows: what is left; numbers: of the rows that are copied, of each layer; of the rank's heads.
    """

    retained: int
    place: Place
    rows: RetainedRows
    numbers: tuple[RowNumbers, ...]


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Forget sequences, retained rows and shared prompts, by name. Those that are unknown are ignored."""

    sequences: tuple[int, ...] = ()
    retained: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JoinBatch:
    """Place a sequence in an empty slot."""

    sequence: int
    slot: int
    num_appended: int


@dataclass(frozen=True)
class LeaveBatch:
    """Empty a slot."""

    slot: int


@dataclass(frozen=True)
class ResetBatch:
    """Empty all slots, whatever state they are in."""


@dataclass(frozen=True, kw_only=True)
class Return:
    """Answered with what `LayerCache.returned` gives of each layer."""

    sequence: int
    num_appended: int
