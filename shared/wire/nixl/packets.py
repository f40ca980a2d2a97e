"""What the two channels beside it tell each other beside the blocks, over the channel below them.

    packet     from        number                  after the head
    ask        sender                              nothing
    offer      receiver                            msgpack map of `Offer`
    refuse     receiver                            the reason, text
    writing    sender      of the write            nothing
    written    sender      of the write            position u64, sizes u32 of the message's frames
    read       receiver                            position u64 up to which the ring is read
    end        sender      1: writes may happen    nothing

A packet's first frame is its head, the second what comes after it. The head begins like a block message's
header, with the ring's number where that has the transfer's. So a receiver without NIXL refuses `ask` with a
NACK that names the ring.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.shared.wire.frames import peek_key
from kvferry.shared.wire.nixl.agent import MAX_METADATA_BYTES

MAGIC = b"KVFN"
VERSION = 1
_HEAD = struct.Struct("<4sHBBQI")
"""magic, version, kind, reserved, ring, number."""
_POSITION = struct.Struct("<Q")


class PacketKind(enum.IntEnum):
    ASK = 1
    OFFER = 2
    REFUSE = 3
    WRITING = 4
    WRITTEN = 5
    READ = 6
    END = 7


@dataclass(frozen=True, kw_only=True)
class Packet:
    kind: PacketKind
    ring: int
    number: int = 0
    rest: bytes = b""

    def frames(self) -> tuple[bytes, bytes]:
        return _HEAD.pack(MAGIC, VERSION, self.kind, 0, self.ring, self.number), self.rest


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A ring's memory: NIXL's metadata for it, its kind, and where it is.

    Attributes: memory: "DRAM": host memory. A ring in a GPU's memory would be "VRAM", with its number.
    """

    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
    memory: Literal["DRAM"]
    device: Annotated[int, Meta(ge=0, le=255)]
    address: Annotated[int, Meta(ge=1)]
    size_bytes: Annotated[int, Meta(ge=1)]


def packet_of(frames: Sequence[memoryview | bytes]) -> Packet | None:
    """The packet in a message's frames; None if it is none. Raises: ValueError: it is malformed."""
    if not frames or len(frames[0]) != _HEAD.size or bytes(frames[0][: len(MAGIC)]) != MAGIC:
        return None
    _, version, kind, _, ring, number = _HEAD.unpack_from(frames[0])
    if version != VERSION or len(frames) != 2:
        raise ValueError(f"a packet of version {version} has {len(frames)} frames")
    return Packet(kind=PacketKind(kind), ring=ring, number=number, rest=bytes(frames[1]))


def is_refusal(frames: Sequence[memoryview | bytes], ring: int) -> bool:
    """Whether a block message is the answer to `ask` of a receiver without NIXL."""
    key = peek_key(frames)
    return key is not None and (key.transfer_id, key.generation) == (ring, 0)


def encode_offer(offer: Offer) -> bytes:
    return msgspec.msgpack.encode(offer)


def decode_offer(rest: bytes) -> Offer:
    """Raises: ValueError: it is none."""
    try:
        return msgspec.msgpack.decode(rest, type=Offer)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def encode_place(position: int, sizes: Sequence[int] = ()) -> bytes:
    """Where a message is, or how far a ring is read."""
    return _POSITION.pack(position) + struct.pack(f"<{len(sizes)}I", *sizes)


def decode_place(rest: bytes) -> tuple[int, tuple[int, ...]]:
    """Raises: ValueError: it is none."""
    try:
        (position,) = _POSITION.unpack_from(rest)
        sizes = struct.unpack_from(f"<{(len(rest) - _POSITION.size) // 4}I", rest, _POSITION.size)
    except struct.error as error:
        raise ValueError(str(error)) from error
    return position, sizes


def cut(ring: memoryview, position: int, sizes: Sequence[int]) -> list[memoryview]:
    """The frames of a message in a ring. Raises: ValueError: it is not within the ring."""
    start = position % len(ring)
    if start + sum(sizes) > len(ring):
        raise ValueError(f"a message of {sum(sizes)} bytes at {position} is not within its ring")
    ends = itertools.accumulate(sizes, initial=start)
    return [ring[begin:end] for begin, end in itertools.pairwise(ends)]
