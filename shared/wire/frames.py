"""The block wire's messages as two frames each: a fixed 56-byte header and a payload.

Place in the request's path: under the sender and receiver state machines, above the channels. Packs and
checks headers and checksums; `records.py` holds the structured payloads, `proto/BLOCKS.md` documents the
format. Does not know order, credits or the sizes that a manifest implies.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.wire.messages import (
    MAX_MANIFEST_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    BlockHeader,
    Section,
    TransferKey,
)

MAGIC = b"KVFB"
HEADER = struct.Struct("<4sHBBQIIHHIQQQ")
"""magic, version, type, section, transfer_id, generation, sequence, layer, reserved, payload_bytes,
section_bytes, offset, checksum."""
HEADER_BYTES = HEADER.size
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size
_KEY = struct.Struct("<QI")
_KEY_OFFSET = 8

NO_PAYLOAD = memoryview(b"")


class MessageType(enum.IntEnum):
    """What a message is. The sender says the first five, the receiver the last three."""

    MANIFEST = 1
    BLOCK = 2
    END = 3
    ABORT = 4
    KEEPALIVE = 5
    CREDIT = 6
    ACK = 7
    NACK = 8


MAX_PAYLOAD_BYTES_BY_TYPE: dict[MessageType, int] = {
    MessageType.MANIFEST: MAX_MANIFEST_BYTES,
    MessageType.BLOCK: MAX_PAYLOAD_BYTES,
    MessageType.END: MAX_MANIFEST_BYTES,
    MessageType.ABORT: 4096,
    MessageType.KEEPALIVE: 0,
    MessageType.CREDIT: 0,
    MessageType.ACK: 0,
    MessageType.NACK: 8192,
}


@dataclass(frozen=True, kw_only=True)
class FrameHeader:
    """The header's fields, checksum and payload size aside. Fields that a type does not use are zero.

    Attributes:
        section: 0, but for BLOCK.
        sequence: BLOCK: its number in the transfer.
        section_bytes: BLOCK: size of the whole section; CREDIT: payload bytes written so far in total.
        offset: BLOCK: where the payload lies in its section, in bytes.
    """

    type: MessageType
    key: TransferKey
    sequence: int = 0
    layer: int = 0
    section: int = 0
    section_bytes: int = 0
    offset: int = 0

    def block(self) -> BlockHeader:
        """The block's header as a sink sees it. Only of a BLOCK."""
        assert self.type is MessageType.BLOCK
        return BlockHeader(
            key=self.key,
            sequence=self.sequence,
            layer=self.layer,
            section=Section(self.section),
            section_bytes=self.section_bytes,
            offset=self.offset,
        )


def encode_header(header: FrameHeader, payload: memoryview | bytes = NO_PAYLOAD) -> bytes:
    """Pack a header with the checksum over itself and its payload, which is not copied.

    Raises:
        TransferFailed: a field does not fit its width.
    """
    payload_bytes = memoryview(payload).nbytes
    if payload_bytes > MAX_PAYLOAD_BYTES_BY_TYPE[header.type]:
        raise TransferFailed(
            f"{header.type.name} payload is {payload_bytes} bytes; at most"
            f" {MAX_PAYLOAD_BYTES_BY_TYPE[header.type]} are allowed",
            reason="size",
        )
    try:
        packed = HEADER.pack(
            MAGIC,
            PROTOCOL_VERSION,
            header.type,
            header.section,
            header.key.transfer_id,
            header.key.generation,
            header.sequence,
            header.layer,
            0,
            payload_bytes,
            header.section_bytes,
            header.offset,
            0,
        )
    except struct.error as error:
        raise TransferFailed(f"{header} does not fit the block header: {error}", reason="size") from error
    checked = packed[:_CHECKED_BYTES]
    return checked + _CHECKSUM.pack(_checksum(checked, payload))


def decode_message(frames: Sequence[memoryview | bytes]) -> tuple[FrameHeader, memoryview]:
    """Check and unpack one message.

    Args:
        frames: header frame and payload frame.

    Returns:
        The header, and the payload as a view of the frame given.

    Raises:
        ProtocolMismatch: not this protocol or version, or fields that no peer of it would send.
        TransferFailed: the checksum is wrong.
    """
    if len(frames) != 2:
        raise _malformed(f"message has {len(frames)} frames; 2 are allowed")
    raw, payload = memoryview(frames[0]), memoryview(frames[1])
    if raw.nbytes != HEADER_BYTES:
        raise _malformed(f"header frame is {raw.nbytes} bytes; it must be {HEADER_BYTES}")
    magic, version, *fields, checksum = HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise _malformed(f"header starts with {magic!r}; it must be {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"peer speaks block protocol version {version}; this side speaks {PROTOCOL_VERSION}",
            reason="protocol_version",
        )
    if _checksum(raw[:_CHECKED_BYTES], payload) != checksum:
        raise TransferFailed("checksum of a message does not match its bytes", reason="checksum")
    return _checked_header(fields, payload.nbytes), payload


def peek_key(frames: Sequence[memoryview | bytes]) -> TransferKey | None:
    """The key that a message seems to carry, whatever else is wrong with it; it stands at the same place in
    every version. For telling which transfer a broken message has broken, never for accepting one."""
    if not frames or memoryview(frames[0]).nbytes < _KEY_OFFSET + _KEY.size:
        return None
    transfer_id, generation = _KEY.unpack_from(frames[0], _KEY_OFFSET)
    return TransferKey(transfer_id=transfer_id, generation=generation)


def _checked_header(fields: list[int], frame_bytes: int) -> FrameHeader:
    (
        type_code, section, transfer_id, generation, sequence, layer, reserved, payload_bytes, section_bytes,
        offset,
    ) = fields  # fmt: skip
    try:
        message_type = MessageType(type_code)
    except ValueError:
        raise _malformed(f"message type is {type_code}; 1 to {max(MessageType)} are allowed") from None
    if reserved != 0:
        raise _malformed(f"reserved field is {reserved}; it must be 0")
    if payload_bytes != frame_bytes:
        raise _malformed(f"header declares {payload_bytes} payload bytes; the frame has {frame_bytes}")
    if payload_bytes > MAX_PAYLOAD_BYTES_BY_TYPE[message_type]:
        raise _malformed(
            f"{message_type.name} payload is {payload_bytes} bytes; at most"
            f" {MAX_PAYLOAD_BYTES_BY_TYPE[message_type]} are allowed"
        )
    if message_type is MessageType.BLOCK:
        _check_block(section, payload_bytes, section_bytes, offset)
    elif section or sequence or layer or offset or (section_bytes and message_type is not MessageType.CREDIT):
        raise _malformed(f"{message_type.name} sets fields that only BLOCK has")
    return FrameHeader(
        type=message_type,
        key=TransferKey(transfer_id=transfer_id, generation=generation),
        sequence=sequence,
        layer=layer,
        section=section,
        section_bytes=section_bytes,
        offset=offset,
    )


def _check_block(section: int, payload_bytes: int, section_bytes: int, offset: int) -> None:
    if section not in Section.__members__.values():
        raise _malformed(f"block section is {section}; 1 to {max(Section)} are allowed")
    if payload_bytes == 0:
        raise _malformed("block is empty; it must carry at least 1 byte")
    if offset + payload_bytes > section_bytes:
        raise _malformed(
            f"block covers bytes {offset} to {offset + payload_bytes} of a section of {section_bytes}"
        )


def _checksum(checked_header: memoryview | bytes, payload: memoryview | bytes) -> int:
    digest = xxhash.xxh3_64(checked_header)
    digest.update(payload)
    return digest.intdigest()


def _malformed(message: str) -> ProtocolMismatch:
    return ProtocolMismatch(message, reason="malformed")
