"""The block wire's messages as bytes, and the one order in which they may arrive.

Place in the request's path: under the sender and receiver state machines, above the channels. A message is a
fixed 56-byte header frame, then frames of payload. Records (manifest, layer, end, nack, abort) travel as
msgpack: a record is refused unless it has every field, no other, of the right type and within the bounds of
`messages.py`. `proto/BLOCKS.md` documents the format. The sink compares manifest and layers with its model
and reservation.
"""

from __future__ import annotations

import math
import re
import reprlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
import torch
import xxhash
from torch import Tensor

from kvferry.shared.errors import (
    KvferryError,
    LeaseExpired,
    MalformedMessage,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.wire.messages import (
    MAX_LAYER_RECORD_BYTES,
    MAX_LAYER_TENSORS,
    MAX_MANIFEST_BYTES,
    MAX_PAYLOAD_BYTES_BY_TYPE,
    MAX_TOKENS,
    MAX_TOTAL_BYTES,
    PROTOCOL_VERSION,
    REASON,
    TENSOR_DTYPE_BYTES,
    TENSOR_KINDS,
    AbortRecord,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    MessageType,
    NackRecord,
    NamedTensor,
    TensorHeader,
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
_MAX_FRAMES = {MessageType.LAYER: 2 + MAX_LAYER_TENSORS, MessageType.BLOCK: 1 + MAX_LAYER_TENSORS}
"""The most frames of a message, including its header; 2 for other types."""
_MAX_MESSAGE_CHARS = 1024


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
            MAGIC, PROTOCOL_VERSION, header.type, 0, header.key.transfer_id, header.key.generation,
            header.sequence, header.layer, 0, payload_bytes, header.total_bytes, header.offset, 0,
        )  # fmt: skip
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
        raise MalformedMessage(
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
        or (sequence and message_type not in (MessageType.LAYER, MessageType.CREDIT))
        or (total_bytes and message_type is not MessageType.CREDIT)
    ):
        raise _malformed(f"{message_type.name} sets fields that only other types have")
    key = TransferKey(transfer_id=transfer_id, generation=generation)
    header = FrameHeader(
        type=message_type, key=key, sequence=sequence, layer=layer, total_bytes=total_bytes, offset=offset
    )
    return header, payload


def peek_key(frames: Sequence[memoryview | bytes]) -> TransferKey | None:
    """Return the key in a message that may be invalid otherwise; its place is the same in every version.

    Use it only to find the transfer of an invalid message, never to accept a message.
    """
    if not frames or memoryview(frames[0]).nbytes < _KEY_OFFSET + _KEY.size:
        return None
    transfer_id, generation = _KEY.unpack_from(frames[0], _KEY_OFFSET)
    return TransferKey(transfer_id=transfer_id, generation=generation)


_Record = TypeVar("_Record")
_REFUSALS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


class _RecordCodec(Generic[_Record]):
    """Writes and reads one kind of record. Both directions raise ProtocolMismatch for a record that is too
    large or has a value out of range; reading also refuses anything that `encode` does not write."""

    def __init__(
        self, kind: type[_Record], limit_bytes: int, check: Callable[[_Record], None] | None = None
    ) -> None:
        self._name, self._limit_bytes, self._check = kind.__name__, limit_bytes, check
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, record: _Record) -> bytes:
        try:
            payload = msgspec.msgpack.encode(record)
        except _REFUSALS as error:
            raise _malformed(f"{self._name} cannot be encoded: {error}") from error
        self.decode(payload)
        return payload

    def decode(self, payload: memoryview | bytes) -> _Record:
        """Decode a record, encode it again and compare: this finds unknown and missing keys, and values such
        as NaN."""
        if len(payload) > self._limit_bytes:
            raise _malformed(f"{self._name} is {len(payload)} bytes; at most {self._limit_bytes} are allowed")
        try:
            record = self._decoder.decode(payload)
            fields: Any = record
            understood: object = msgspec.msgpack.decode(msgspec.msgpack.encode(asdict(fields)))
            same = understood == msgspec.msgpack.decode(payload)
        except _REFUSALS as error:
            raise _malformed(f"{self._name}: {_explain(str(error), payload)}") from error
        if not same:
            raise _malformed(f"{self._name} has or lacks fields that this version does not know")
        if self._check is not None:
            self._check(record)
        return record


def _explain(error: str, payload: memoryview | bytes) -> str:
    """Add to msgspec's message the field's value, which it does not show:
    `num_layers is 0; Expected int >= 1`.

    For an item of a list it shows the list, because msgspec does not say which item it is.
    """
    expected, _, path = error.partition(" - at `$")
    names = re.findall(r"\w+", path.partition("[")[0])
    try:
        value = msgspec.msgpack.decode(payload)
        for name in names:
            value = value[name]
    except (*_REFUSALS, KeyError):
        return error
    return f"{'.'.join(names) or 'it'} is {reprlib.repr(value)}; {expected}"


def _check_manifest(manifest: Manifest) -> None:
    if manifest.layer_rows and len(manifest.layer_rows) != manifest.num_layers:
        raise _malformed(
            f"layer_rows has {len(manifest.layer_rows)} entries; none or {manifest.num_layers} are allowed"
        )


def _check_end(end: EndRecord) -> None:
    if (token := end.first_token) is not None:
        numbers = [token.token_id, token.index, *(token_id for token_id, _ in token.top_logprobs)]
        if not 0 <= min(numbers) <= max(numbers) <= MAX_TOKENS:
            raise _malformed(f"first_token has numbers {numbers[:8]}; 0 to {MAX_TOKENS} are allowed")


_MANIFEST = _RecordCodec(Manifest, MAX_MANIFEST_BYTES, _check_manifest)
_LAYER = _RecordCodec(LayerHeader, MAX_LAYER_RECORD_BYTES)
_END = _RecordCodec(EndRecord, MAX_MANIFEST_BYTES, _check_end)
_NACK = _RecordCodec(NackRecord, MAX_PAYLOAD_BYTES_BY_TYPE[MessageType.NACK])
_ABORT = _RecordCodec(AbortRecord, MAX_PAYLOAD_BYTES_BY_TYPE[MessageType.ABORT])
encode_manifest, decode_manifest = _MANIFEST.encode, _MANIFEST.decode
encode_layer, decode_layer = _LAYER.encode, _LAYER.decode
encode_end, decode_end = _END.encode, _END.decode
_KINDS: dict[str, type[TransferFailed]] = {
    kind.__name__: kind for kind in (TransferFailed, ProtocolMismatch, MalformedMessage, LeaseExpired)
}


def encode_nack(error: KvferryError) -> bytes:
    """Encode an error for the sender to raise; TransferFailed and its subclasses keep their class."""
    kind = type(error).__name__ if type(error).__name__ in _KINDS else TransferFailed.__name__
    message = error.message[:_MAX_MESSAGE_CHARS]
    return _NACK.encode(NackRecord(kind=kind, reason=clean_reason(error.reason), message=message))


def decode_nack(payload: memoryview | bytes) -> TransferFailed:
    """Return the error. Raises ProtocolMismatch on anything that `encode_nack` does not write."""
    record = _NACK.decode(payload)
    if record.kind not in _KINDS:
        raise _malformed(f"kind is {record.kind!r}; {', '.join(_KINDS)} are allowed")
    return _KINDS[record.kind](record.message, reason=record.reason)


def encode_abort(reason: str) -> bytes:
    """Encode a reason; one that is not a valid label is sent as "other"."""
    return _ABORT.encode(AbortRecord(reason=clean_reason(reason)))


def decode_abort(payload: memoryview | bytes) -> str:
    """Return the sender's reason. Raises ProtocolMismatch on anything that `encode_abort` does not write."""
    return _ABORT.decode(payload).reason


def clean_reason(reason: str) -> str:
    """Return the reason if it is a valid label, `[a-z][a-z0-9_]*` of at most 64 characters; else "other"."""
    return reason if re.fullmatch(REASON, reason) else "other"


def _malformed(message: str) -> MalformedMessage:
    return MalformedMessage(f"malformed block wire message: {message}", reason="malformed")


_TENSOR_NAME = attrgetter("name")
_DTYPE_NAMES = {getattr(torch, name): name for name in TENSOR_DTYPE_BYTES}


def tensor_header(named: NamedTensor) -> TensorHeader:
    """Return what a layer's header says of a tensor. Raises TransferFailed: another dtype or kind."""
    dtype = _DTYPE_NAMES.get(named.tensor.dtype)
    if dtype is None:
        raise TransferFailed(
            f"{named.name} is {named.tensor.dtype}; {', '.join(TENSOR_DTYPE_BYTES)} are allowed",
            reason="dtype",
        )
    if named.kind not in TENSOR_KINDS:
        raise TransferFailed(
            f"{named.name} is counted as {named.kind!r}; {', '.join(TENSOR_KINDS)} are allowed", reason="kind"
        )
    return TensorHeader(name=named.name, dtype=dtype, shape=tuple(named.tensor.shape))


def cut(tensors: Sequence[NamedTensor], limit_bytes: int) -> Iterator[tuple[int, list[Tensor], list[str]]]:
    """Yield what each message carries of the tensors: how many bytes, the parts and their kinds. The first
    one may carry nothing."""
    parts: list[Tensor] = []
    kinds: list[str] = []
    room = limit_bytes
    for named in tensors:
        flat = named.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while flat.numel():
            if room == 0:
                yield limit_bytes, parts, kinds
                parts, kinds, room = [], [], limit_bytes
            parts.append(flat[:room])
            kinds.append(named.kind)
            flat, room = flat[room:], max(0, room - flat.numel())
    yield limit_bytes - room, parts, kinds


def tensor_starts(layer: LayerHeader) -> list[int]:
    """Return where each tensor starts in the layer's bytes, and where the last one ends."""
    starts = [0]
    for tensor in layer.tensors:
        starts.append(starts[-1] + math.prod(tensor.shape) * TENSOR_DTYPE_BYTES[tensor.dtype])
    return starts


class TransferCursor:
    """Tracks the only message that a transfer allows next. Both ends advance one alike. Not thread-safe.

        LAYER 0 bytes  BLOCK bytes  BLOCK bytes ..  LAYER 1 bytes ..      complete
                              ▲ layer, offset

    Layers are sent in order from 0. The bytes of a layer's tensors are sent one tensor after another without
    gaps: the first bytes in the LAYER message, the rest in BLOCKs.

    Attributes:
        sequence: number of the next layer header or block.
        num_blocks, payload_bytes: the blocks and the tensor bytes that have passed.
        layer, layer_bytes, offset: the current layer, -1 before the first; size of its tensors, and how much
            of it has passed.
        starts: `tensor_starts` of the current layer.
    """

    def __init__(self, num_layers: int) -> None:
        self.sequence = self.num_blocks = self.payload_bytes = 0
        self.layer, self.layer_bytes, self.offset = -1, 0, 0
        self.starts = [0]
        self._num_layers = num_layers
        self._tensors: tuple[TensorHeader, ...] = ()

    def check_complete(self) -> None:
        """Raise TransferFailed ("incomplete") unless every tensor of every layer has passed."""
        if self.layer + 1 < self._num_layers or self.offset < self.layer_bytes:
            raise TransferFailed(f"transfer ends where {self._expected()} is expected", reason="incomplete")

    def pass_layer(self, sequence: int, layer: LayerHeader, num_bytes: int = 0) -> None:
        """Begin a layer, whose message carries `num_bytes` of its tensors.

        Raises:
            TransferFailed: it is not the next one ("order"), or has fewer bytes ("size").
            ProtocolMismatch: two tensors have one name, or they are too large together.
        """
        is_next = layer.layer == self.layer + 1 < self._num_layers and self.offset == self.layer_bytes
        if sequence != self.sequence or not is_next:
            raise self._wrong_order(f"header {sequence}, of layer {layer.layer},")
        starts = tensor_starts(layer)
        layer_bytes = starts[-1]
        if len(set(map(_TENSOR_NAME, layer.tensors))) < len(layer.tensors) or layer_bytes > MAX_TOTAL_BYTES:
            raise _malformed(
                f"layer {layer.layer} has tensors {layer.tensors}; different names and at most"
                f" {MAX_TOTAL_BYTES} bytes are allowed"
            )
        if num_bytes > layer_bytes:
            raise TransferFailed(
                f"layer {layer.layer} was received with {num_bytes} bytes; its header implies {layer_bytes}",
                reason="size",
            )
        self._tensors, self.starts, self.layer_bytes = layer.tensors, starts, layer_bytes
        self.layer += 1
        self.sequence += 1
        self.payload_bytes += num_bytes
        self.offset = num_bytes

    def pass_block(self, header: FrameHeader, num_bytes: int) -> None:
        """Pass one block of `num_bytes` payload bytes.

        Raises:
            TransferFailed: it is not the next one ("order"), or the layer is not as large as its header says,
                or the block reaches beyond it or is empty ("size").
        """
        left_bytes = self.layer_bytes - self.offset
        position = header.sequence, header.layer, header.offset
        if not left_bytes or position != (self.sequence, self.layer, self.offset):
            raise self._wrong_order(
                f"block {header.sequence}, of layer {header.layer} offset {header.offset},"
            )
        if header.total_bytes != self.layer_bytes or not 1 <= num_bytes <= left_bytes:
            raise TransferFailed(
                f"layer {header.layer} is {header.total_bytes} bytes (block: {num_bytes} at {header.offset});"
                f" the layer's header implies {self.layer_bytes}",
                reason="size",
            )
        self.sequence += 1
        self.num_blocks += 1
        self.payload_bytes += num_bytes
        self.offset += num_bytes

    def _wrong_order(self, received: str) -> TransferFailed:
        message = f"{received} was received; number {self.sequence}, {self._expected()} is expected"
        return TransferFailed(message, reason="order")

    def _expected(self) -> str:
        if self.offset < self.layer_bytes:
            tensor = bisect_right(self.starts, self.offset) - 1
            inside = f"{self._tensors[tensor].name} offset {self.offset - self.starts[tensor]}"
            return f"offset {self.offset} of layer {self.layer} ({inside})"
        if self.layer + 1 < self._num_layers:
            return f"the header of layer {self.layer + 1}"
        return "nothing more"
