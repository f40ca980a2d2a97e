"""The block wire's messages as two frames each: a fixed 56-byte header and a payload.

Place in the request's path: under the sender and receiver state machines, above the channels. Packs and
checks headers and checksums; `records.py` has the structured payloads, `proto/BLOCKS.md` documents the
format. Order, credits and the sizes of tensors are checked elsewhere.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.wire.messages import (
    MAX_LAYER_TENSORS,
    MAX_MANIFEST_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    BlockHeader,
    TransferKey,
)

MAGIC = b"KVFB"
HEADER = struct.Struct("<4sHBBQIIHHIQQQ")
"""magic, version, type, tensor, transfer_id, generation, sequence, layer, reserved, payload_bytes,
tensor_bytes, offset, checksum."""
HEADER_BYTES = HEADER.size
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size
_KEY = struct.Struct("<QI")
_KEY_OFFSET = 8

NO_PAYLOAD = memoryview(b"")


class MessageType(enum.IntEnum):
    """What a message is. The first six come from the sender, the last three from the receiver."""

    MANIFEST = 1
    LAYER = 2
    BLOCK = 3
    END = 4
    ABORT = 5
    KEEPALIVE = 6
    CREDIT = 7
    ACK = 8
    NACK = 9


MAX_PAYLOAD_BYTES_BY_TYPE: dict[MessageType, int] = {
    MessageType.MANIFEST: MAX_MANIFEST_BYTES,
    MessageType.LAYER: 4096,
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
        sequence: LAYER, BLOCK: the message's number among them in the transfer.
        layer: BLOCK.
        tensor: BLOCK: index into the layer's header.
        tensor_bytes: BLOCK: size of the whole tensor; CREDIT: payload bytes written so far in total.
        offset: BLOCK: where the payload starts in its tensor, in bytes.
    """

    type: MessageType
    key: TransferKey
    sequence: int = 0
    layer: int = 0
    tensor: int = 0
    tensor_bytes: int = 0
    offset: int = 0

    def block(self) -> BlockHeader:
        """The header of a BLOCK as a sink sees it."""
        assert self.type is MessageType.BLOCK
        return BlockHeader(
            key=self.key,
            sequence=self.sequence,
            layer=self.layer,
            tensor=self.tensor,
            tensor_bytes=self.tensor_bytes,
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
            header.tensor,
            header.key.transfer_id,
            header.key.generation,
            header.sequence,
            header.layer,
            0,
            payload_bytes,
            header.tensor_bytes,
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
    """The key in a message that may be broken otherwise; it is at the same place in every version. Only for
    telling which transfer a broken message belongs to, never for accepting one."""
    if not frames or memoryview(frames[0]).nbytes < _KEY_OFFSET + _KEY.size:
        return None
    transfer_id, generation = _KEY.unpack_from(frames[0], _KEY_OFFSET)
    return TransferKey(transfer_id=transfer_id, generation=generation)


def _checked_header(fields: list[int], frame_bytes: int) -> FrameHeader:
    (
        type_code, tensor, transfer_id, generation, sequence, layer, reserved, payload_bytes, tensor_bytes,
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
        if tensor >= MAX_LAYER_TENSORS:
            raise _malformed(f"block tensor is {tensor}; 0 to {MAX_LAYER_TENSORS - 1} are allowed")
        if payload_bytes == 0:
            raise _malformed("block is empty; it must carry at least 1 byte")
        if offset + payload_bytes > tensor_bytes:
            raise _malformed(
                f"block covers bytes {offset} to {offset + payload_bytes} of a tensor of {tensor_bytes}"
            )
    elif (
        tensor
        or layer
        or offset
        or (sequence and message_type is not MessageType.LAYER)
        or (tensor_bytes and message_type is not MessageType.CREDIT)
    ):
        raise _malformed(f"{message_type.name} sets fields that only other types have")
    return FrameHeader(
        type=message_type,
        key=TransferKey(transfer_id=transfer_id, generation=generation),
        sequence=sequence,
        layer=layer,
        tensor=tensor,
        tensor_bytes=tensor_bytes,
        offset=offset,
    )


def _checksum(checked_header: memoryview | bytes, payload: memoryview | bytes) -> int:
    digest = xxhash.xxh3_64(checked_header)
    digest.update(payload)
    return digest.intdigest()


def _malformed(message: str) -> ProtocolMismatch:
    return ProtocolMismatch(message, reason="malformed")
