"""The block wire's messages as bytes: a fixed 56-byte header frame, then frames of payload.

Place in the request's path: under the sender and receiver state machines, above the channels. Packs and
checks headers and checksums, and the records (manifest, layer, end, nack, abort), which travel as msgpack: a
record is refused unless it has every field, no other, of the right type and within the bounds of
`messages.py`. `proto/BLOCKS.md` documents the format. Order and credits are checked elsewhere; the sink
compares manifest and layers with its model and reservation.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import xxhash

from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.wire.messages import (
    MAX_LAYER_TENSORS,
    MAX_MANIFEST_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TOKENS,
    MAX_TOTAL_BYTES,
    PROTOCOL_VERSION,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    MessageType,
    TransferKey,
)

MAGIC = b"KVFB"
HEADER = struct.Struct("<4sHBBQIIHHIQQQ")
"""magic, version, type, reserved, transfer_id, generation, sequence, layer, reserved, payload_bytes,
total_bytes, offset, checksum."""
HEADER_BYTES = HEADER.size
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size
_KEY = struct.Struct("<QI")
_KEY_OFFSET = 8

NO_PAYLOAD = (memoryview(b""),)
MAX_LAYER_RECORD_BYTES = 4096
MAX_PAYLOAD_BYTES_BY_TYPE: dict[MessageType, int] = {
    MessageType.MANIFEST: MAX_MANIFEST_BYTES,
    MessageType.LAYER: MAX_LAYER_RECORD_BYTES + MAX_PAYLOAD_BYTES,
    MessageType.BLOCK: MAX_PAYLOAD_BYTES,
    MessageType.END: MAX_MANIFEST_BYTES,
    MessageType.ABORT: 4096,
    MessageType.KEEPALIVE: 0,
    MessageType.CREDIT: 0,
    MessageType.ACK: 0,
    MessageType.NACK: 8192,
}
_MAX_FRAMES = {MessageType.LAYER: 2 + MAX_LAYER_TENSORS, MessageType.BLOCK: 1 + MAX_LAYER_TENSORS}
"""Of a message, its header included; 2 of the other types."""
_MAX_MESSAGE_CHARS = 1024
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")


def encode_header(header: FrameHeader, payload: Sequence[memoryview | bytes] = NO_PAYLOAD) -> bytes:
    """Pack a header with the checksum over itself and its payload's frames, which are not copied.

    Raises:
        TransferFailed: the payload is too large, or a field does not fit its width.
    """
    payload_bytes = sum(map(len, payload))
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
            0,
            header.key.transfer_id,
            header.key.generation,
            header.sequence,
            header.layer,
            0,
            payload_bytes,
            header.total_bytes,
            header.offset,
            0,
        )
    except struct.error as error:
        raise TransferFailed(f"{header} does not fit the block header: {error}", reason="size") from error
    checked = packed[:_CHECKED_BYTES]
    digest = xxhash.xxh3_64(checked)
    for frame in payload:
        digest.update(frame)
    return checked + _CHECKSUM.pack(digest.intdigest())


def decode_message(frames: Sequence[memoryview | bytes]) -> tuple[FrameHeader, Sequence[memoryview | bytes]]:
    """Check and unpack one message.

    Args:
        frames: header frame and payload frames, bytes or views of bytes.

    Returns:
        The header, and the payload's frames.

    Raises:
        ProtocolMismatch: another protocol or version, or field values that the protocol does not allow.
        TransferFailed: the checksum is wrong.
    """
    if len(frames) < 2:
        raise _malformed(f"message has {len(frames)} frames; at least 2 are allowed")
    raw, payload = frames[0], frames[1:]
    if len(raw) != HEADER_BYTES:
        raise _malformed(f"header frame is {len(raw)} bytes; it must be {HEADER_BYTES}")
    (
        magic, version, type_code, reserved, transfer_id, generation, sequence, layer, reserved_too,
        payload_bytes, total_bytes, offset, checksum,
    ) = HEADER.unpack_from(raw)  # fmt: skip
    if magic != MAGIC:
        raise _malformed(f"header starts with {magic!r}; it must be {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"peer speaks block protocol version {version}; this side speaks {PROTOCOL_VERSION}",
            reason="protocol_version",
        )
    digest = xxhash.xxh3_64(raw[:_CHECKED_BYTES])
    for frame in payload:
        digest.update(frame)
    if digest.intdigest() != checksum:
        raise TransferFailed("checksum of a message does not match its bytes", reason="checksum")
    try:
        message_type = MessageType(type_code)
    except ValueError:
        raise _malformed(f"message type is {type_code}; 1 to {max(MessageType)} are allowed") from None
    if len(frames) > _MAX_FRAMES.get(message_type, 2):
        raise _malformed(f"{message_type.name} has {len(frames)} frames; too many")
    if reserved or reserved_too:
        raise _malformed(f"reserved fields are {reserved} and {reserved_too}; they must be 0")
    frame_bytes = sum(map(len, payload))
    if payload_bytes != frame_bytes:
        raise _malformed(f"header declares {payload_bytes} payload bytes; the frames have {frame_bytes}")
    if payload_bytes > MAX_PAYLOAD_BYTES_BY_TYPE[message_type]:
        raise _malformed(
            f"{message_type.name} payload is {payload_bytes} bytes; at most"
            f" {MAX_PAYLOAD_BYTES_BY_TYPE[message_type]} are allowed"
        )
    if message_type is MessageType.BLOCK:
        if payload_bytes == 0:
            raise _malformed("block is empty; it must carry at least 1 byte")
        if offset + payload_bytes > total_bytes:
            raise _malformed(
                f"block covers bytes {offset} to {offset + payload_bytes} of a layer of {total_bytes}"
            )
    elif (
        layer
        or offset
        or (sequence and message_type is not MessageType.LAYER)
        or (total_bytes and message_type is not MessageType.CREDIT)
    ):
        raise _malformed(f"{message_type.name} sets fields that only other types have")
    key = TransferKey(transfer_id=transfer_id, generation=generation)
    header = FrameHeader(
        type=message_type, key=key, sequence=sequence, layer=layer, total_bytes=total_bytes, offset=offset
    )
    return header, payload


def peek_key(frames: Sequence[memoryview | bytes]) -> TransferKey | None:
    """The key in a message that may be invalid otherwise; its place is the same in every version.

    Use it only to find the transfer of an invalid message, never to accept a message.
    """
    if not frames or memoryview(frames[0]).nbytes < _KEY_OFFSET + _KEY.size:
        return None
    transfer_id, generation = _KEY.unpack_from(frames[0], _KEY_OFFSET)
    return TransferKey(transfer_id=transfer_id, generation=generation)


# ---- records -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NackRecord:
    """Why a receiver refuses: the error's class, reason and message."""

    kind: str
    reason: Annotated[str, msgspec.Meta(pattern=rf"^{_REASON.pattern}\Z")]
    message: str


@dataclass(frozen=True, kw_only=True)
class AbortRecord:
    """Why a sender gave up."""

    reason: Annotated[str, msgspec.Meta(pattern=rf"^{_REASON.pattern}\Z")]


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record", bound="DataclassInstance")
_MANIFEST = msgspec.msgpack.Decoder(Manifest)
_LAYER = msgspec.msgpack.Decoder(LayerHeader)
_END = msgspec.msgpack.Decoder(EndRecord)
_NACK = msgspec.msgpack.Decoder(NackRecord)
_ABORT = msgspec.msgpack.Decoder(AbortRecord)
_KINDS: dict[str, type[TransferFailed]] = {
    kind.__name__: kind for kind in (TransferFailed, ProtocolMismatch, LeaseExpired)
}


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises ProtocolMismatch if a field is out of range or the record is too large."""
    payload = _encode(manifest, MAX_MANIFEST_BYTES)
    decode_manifest(payload)
    return payload


def decode_manifest(payload: memoryview | bytes) -> Manifest:
    """Raises ProtocolMismatch on anything that `encode_manifest` does not write."""
    manifest = _decode(_MANIFEST, payload, MAX_MANIFEST_BYTES)
    if manifest.layer_rows and len(manifest.layer_rows) != manifest.num_layers:
        raise _malformed(
            f"layer_rows has {len(manifest.layer_rows)} entries; none or {manifest.num_layers} are allowed"
        )
    return manifest


def encode_layer(layer: LayerHeader) -> bytes:
    """Raises ProtocolMismatch where a field is out of range."""
    payload = _encode(layer, MAX_LAYER_RECORD_BYTES)
    decode_layer(payload)
    return payload


def decode_layer(payload: memoryview | bytes) -> LayerHeader:
    """Raises ProtocolMismatch on anything that `encode_layer` does not write."""
    layer = _decode(_LAYER, payload, MAX_LAYER_RECORD_BYTES)
    names = set()
    for tensor in layer.tensors:
        names.add(tensor.name)
    if len(names) < len(layer.tensors) or layer.starts[-1] > MAX_TOTAL_BYTES:
        raise _malformed(
            f"layer {layer.layer} has tensors {layer.tensors}; different names and at most"
            f" {MAX_TOTAL_BYTES} bytes are allowed"
        )
    return layer


def encode_end(end: EndRecord) -> bytes:
    """Raises ProtocolMismatch where a field is out of range."""
    payload = _encode(end, MAX_MANIFEST_BYTES)
    decode_end(payload)
    return payload


def decode_end(payload: memoryview | bytes) -> EndRecord:
    """Raises ProtocolMismatch on anything that `encode_end` does not write."""
    end = _decode(_END, payload, MAX_MANIFEST_BYTES)
    if (token := end.first_token) is not None:
        numbers = [token.token_id, token.index, *(token_id for token_id, _ in token.top_logprobs)]
        if not 0 <= min(numbers) <= max(numbers) <= MAX_TOKENS:
            raise _malformed(f"first_token has numbers {numbers[:8]}; 0 to {MAX_TOKENS} are allowed")
    return end


def encode_nack(error: KvferryError) -> bytes:
    """An error for the sender to raise; its class is preserved if it is TransferFailed or a subclass."""
    kind = type(error).__name__ if type(error).__name__ in _KINDS else TransferFailed.__name__
    message = error.message[:_MAX_MESSAGE_CHARS]
    record = NackRecord(kind=kind, reason=clean_reason(error.reason), message=message)
    return _encode(record, MAX_PAYLOAD_BYTES_BY_TYPE[MessageType.NACK])


def decode_nack(payload: memoryview | bytes) -> TransferFailed:
    """Returns the error. Raises ProtocolMismatch on anything that `encode_nack` does not write."""
    record = _decode(_NACK, payload, MAX_PAYLOAD_BYTES_BY_TYPE[MessageType.NACK])
    if record.kind not in _KINDS:
        raise _malformed(f"kind is {record.kind!r}; {', '.join(_KINDS)} are allowed")
    return _KINDS[record.kind](record.message, reason=record.reason)


def encode_abort(reason: str) -> bytes:
    """A reason that is not a valid label is sent as "other"."""
    return _encode(AbortRecord(reason=clean_reason(reason)), MAX_PAYLOAD_BYTES_BY_TYPE[MessageType.ABORT])


def decode_abort(payload: memoryview | bytes) -> str:
    """The sender's reason. Raises ProtocolMismatch on anything that `encode_abort` does not write."""
    return _decode(_ABORT, payload, MAX_PAYLOAD_BYTES_BY_TYPE[MessageType.ABORT]).reason


def clean_reason(reason: str) -> str:
    """The reason if it is a valid label, `[a-z][a-z0-9_]*` of at most 64 characters; else "other"."""
    return reason if _REASON.fullmatch(reason) else "other"


def _encode(record: object, limit_bytes: int) -> bytes:
    name = type(record).__name__
    try:
        payload = msgspec.msgpack.encode(record)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolMismatch(f"{name} cannot be encoded: {error}", reason="malformed") from error
    if len(payload) > limit_bytes:
        raise ProtocolMismatch(
            f"{name} is {len(payload)} bytes; at most {limit_bytes} are allowed", reason="size"
        )
    return payload


def _decode(
    decoder: msgspec.msgpack.Decoder[_Record], payload: memoryview | bytes, limit_bytes: int
) -> _Record:
    """Decode a record, encode it again and compare, which finds unknown keys, missing keys and values such as
    NaN."""
    size_bytes = memoryview(payload).nbytes
    if size_bytes > limit_bytes:
        raise _malformed(f"record is {size_bytes} bytes; at most {limit_bytes} are allowed")
    try:
        record = decoder.decode(payload)
        understood: object = msgspec.msgpack.decode(msgspec.msgpack.encode(asdict(record)))
        same = understood == msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _malformed(str(error)) from error
    if not same:
        raise _malformed("it has fields, or lacks fields, that this version does not know")
    return record


def _malformed(message: str) -> ProtocolMismatch:
    return ProtocolMismatch(f"malformed block wire message: {message}", reason="malformed")
