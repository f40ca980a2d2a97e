"""Readers of messages between services: block frames, their records, control messages."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import xxhash
from google.protobuf.message import Message

from kvferry.proto import control_pb2 as pb
from kvferry.shared.control.codec import CODECS
from kvferry.shared.control.seal import Seal
from kvferry.shared.errors import (
    InvalidRequest,
    KvferryError,
    ProtocolMismatch,
    TransferFailed,
    WorkerUnavailable,
)
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire import frames
from kvferry.shared.wire.channel import PeerLost, Received, SendResult
from kvferry.shared.wire.frames import HEADER, TransferCursor, encode_header, tensor_starts
from kvferry.shared.wire.messages import (
    TENSOR_DTYPE_BYTES,
    AbortRecord,
    BlockHeader,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    MessageType,
    NackRecord,
    TensorHeader,
    TransferKey,
)
from kvferry.shared.wire.receiver import BlockServer
from kvtest.fuzz.mutate import NUMBERS, TEXTS, spoilt_bytes, spoilt_tree
from kvtest.fuzz.run import Case, Target

MAX_LAYER_BYTES = 1 << 20
"""What the sink here has reserved."""

# ---- what is right ---------------------------------------------------------------------------------------


def key(rng: Random) -> TransferKey:
    return TransferKey(transfer_id=rng.choice((7, 7, 8, 2**64 - 1)), generation=rng.choice((0, 0, 1)))


def manifest(rng: Random, its_key: TransferKey, num_layers: int) -> Manifest:
    return Manifest(
        purpose=rng.choice(("cache", "history")),
        key=its_key,
        request_id="r",
        model_fingerprint="f",
        dtype="float32",
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=4,
        start=rng.randrange(9),
        num_tokens=rng.randrange(99),
        plan_digest="00ff" * rng.randrange(3),
        layer_rows=tuple(rng.randrange(9) for _ in range(num_layers)) if rng.random() < 0.3 else (),
    )


def layer(rng: Random, number: int) -> LayerHeader:
    tensors = tuple(
        TensorHeader(
            name=f"t{index}",
            dtype=rng.choice(list(TENSOR_DTYPE_BYTES)),
            shape=tuple(rng.randrange(5) for _ in range(rng.randrange(1, 4))),
        )
        for index in range(rng.randrange(4))
    )
    return LayerHeader(layer=number, tensors=tensors)


# ---- frames ----------------------------------------------------------------------------------------------


class _Channel:
    """A channel that keeps what it is given, and whose poll has nothing."""

    endpoint = "fuzz"

    def __init__(self) -> None:
        self.sent: list[Sequence[memoryview | bytes]] = []

    def open(self) -> None: ...
    def close(self) -> None: ...
    def wake(self) -> None: ...

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        return ()

    def send(self, peer: bytes, message: Sequence[memoryview | bytes]) -> SendResult:
        self.sent.append(message)
        return SendResult.SENT


class _Sink:
    """Reserves nothing, and checks that every write is inside what was announced, in order."""

    def __init__(self) -> None:
        self._expected: dict[TransferKey, list[list[int]]] = {}

    def open(self, transfer: Manifest) -> None:
        self._expected[transfer.key] = []

    def begin_layer(self, its_key: TransferKey, header: LayerHeader) -> None:
        starts = tensor_starts(header)
        if starts[-1] > MAX_LAYER_BYTES:
            raise ProtocolMismatch("larger than what is reserved", reason="tensors")
        sizes = [end - begin for begin, end in itertools.pairwise(starts)]
        self._expected[its_key] = [[size, 0] for size in sizes]

    def write(self, block: BlockHeader, payload: memoryview) -> None:
        size, written = expected = self._expected[block.key][block.tensor]
        assert block.offset == written
        assert 0 < payload.nbytes <= size - written
        expected[1] += payload.nbytes

    def commit(self, end: EndRecord) -> None:
        assert all(size == written for size, written in self._expected.pop(end.key))

    def abort(self, its_key: TransferKey, reason: str) -> None:
        self._expected.pop(its_key)


class _Frames:
    """A receiver that gets whole transfers, some of whose messages are spoilt. A message is one entry of a
    case: the number of its frames, their sizes, and their bytes."""

    def __init__(self) -> None:
        self._channel, self._sink = _Channel(), _Sink()
        self._server = BlockServer(self._channel, self._sink)
        self._server.close()  # its thread: messages are given to it here

    def make(self, rng: Random) -> Case:
        its_key = key(rng)
        messages: list[list[bytes]] = []

        def add(header: FrameHeader, *payload: bytes) -> None:
            messages.append([encode_header(header, payload), *payload])

        num_layers = rng.randrange(1, 4)
        add(
            FrameHeader(type=MessageType.MANIFEST, key=its_key),
            frames.encode_manifest(manifest(rng, its_key, num_layers)),
        )
        sequence = num_blocks = total = 0
        for number in range(num_layers):
            header = layer(rng, number)
            data = rng.randbytes(tensor_starts(header)[-1])
            total += len(data)
            first = rng.randrange(len(data) + 1)
            record = frames.encode_layer(header)
            frame_header = FrameHeader(type=MessageType.LAYER, key=its_key, sequence=sequence)
            add(frame_header, record, *([data[:first]] if first else []))
            sequence += 1
            while first < len(data):
                part = data[first : first + rng.randrange(1, len(data) + 1)]
                block = FrameHeader(
                    type=MessageType.BLOCK, key=its_key, sequence=sequence, layer=number,
                    total_bytes=len(data), offset=first,
                )  # fmt: skip
                add(block, part)
                sequence, num_blocks, first = sequence + 1, num_blocks + 1, first + len(part)
        end = EndRecord(key=its_key, num_blocks=num_blocks, payload_bytes=total, first_token=token(rng))
        add(FrameHeader(type=MessageType.END, key=its_key), frames.encode_end(end))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            self._spoil(rng, messages)
        return tuple(map(pack, messages))

    def _spoil(self, rng: Random, messages: list[list[bytes]]) -> None:
        at = rng.randrange(len(messages))
        match rng.randrange(8):
            case 0:
                del messages[at]
                messages.append([b""])
            case 1:
                messages.insert(at, messages[rng.randrange(len(messages))])
            case 2:
                messages[at] = [spoilt_bytes(rng, frame) for frame in messages[at]]
            case 3:
                messages[at] = messages[at] * rng.choice((1, 2, 9, 20))
            case 4:
                messages[at] = sealed(
                    [messages[at][0], *(spoilt_bytes(rng, part) for part in messages[at][1:])]
                )
            case 5 if len(messages[at]) > 1:
                messages[at] = sealed(
                    [messages[at][0], spoilt_record(rng, messages[at][1]), *messages[at][2:]]
                )
            case _:
                messages[at] = sealed([spoilt_header(rng, messages[at][0]), *messages[at][1:]])

    def read(self, case: Case) -> str:
        self._channel.sent.clear()
        for message in case:
            self._server._on_received(Received(peer=b"p", frames=unpack(message)))
        found = [frames.decode_message([bytes(part) for part in sent]) for sent in self._channel.sent]
        reasons = {frames.decode_nack(bytes(p[0])).reason for h, p in found if h.type is MessageType.NACK}
        assert "internal" not in reasons, "the receiver failed internally"
        for incoming in tuple(self._server._transfers.values()):
            self._server._drop(incoming, "closed")
        self._server._committed.clear()
        ended = any(header.type is MessageType.ACK for header, _ in found)
        return " ".join(["ack" if ended else "", *sorted(reasons)]).strip() or "nothing"


def token(rng: Random) -> SampledToken | None:
    if rng.random() < 0.5:
        return None
    return SampledToken(token_id=rng.randrange(99), index=0, logprob=-0.5, top_logprobs=((1, -0.5),))


def pack(message: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(message) + 1}I", len(message), *map(len, message)) + b"".join(message)


def unpack(message: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", message)
    sizes = struct.unpack_from(f"<{count}I", message, 4)
    parts, at = [], 4 * (count + 1)
    for size in sizes:
        parts.append(message[at : at + size])
        at += size
    return parts


def sealed(message: list[bytes]) -> list[bytes]:
    """The message with its sizes and checksum made right, so that it reaches the readers behind them."""
    head = message[0]
    if len(head) != HEADER.size:
        return message
    values = list(HEADER.unpack(head))
    values[9] = min(sum(map(len, message[1:])), 2**32 - 1)
    checked = HEADER.pack(*values)[:-8]
    digest = xxhash.xxh3_64(checked)
    for part in message[1:]:
        digest.update(part)
    return [checked + struct.pack("<Q", digest.intdigest()), *message[1:]]


def spoilt_header(rng: Random, head: bytes) -> bytes:
    """A header with another value in one of its fields."""
    if len(head) != HEADER.size:
        return head
    values = list(HEADER.unpack(head))
    at = rng.randrange(1, len(values) - 1)
    bits = (32, 16, 8, 8, 64, 32, 32, 16, 16, 32, 64, 64, 64)[at]
    near = (values[at] + rng.choice((-1, 1))) % 2**bits
    values[at] = rng.choice((rng.choice(NUMBERS) % 2**bits, near, near))
    return HEADER.pack(*values)


def spoilt_record(rng: Random, record: bytes) -> bytes:
    """A record of MessagePack with one change in its tree."""
    try:
        return msgspec.msgpack.encode(spoilt_tree(rng, msgspec.msgpack.decode(record)))
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return spoilt_bytes(rng, record)


# ---- records ---------------------------------------------------------------------------------------------

_READERS: dict[int, Callable[[bytes], Any]] = {
    0: frames.decode_manifest, 1: frames.decode_layer, 2: frames.decode_end, 3: frames.decode_nack,
    4: frames.decode_abort,
}  # fmt: skip


def make_record(rng: Random) -> Case:
    """A record and, in its first byte, which one it is."""
    kind = rng.choice((0, 1, 1, 1, 2, 3, 4))
    its_key = key(rng)
    values: tuple[Any, ...] = (
        manifest(rng, its_key, rng.randrange(1, 4)),
        layer(rng, rng.randrange(3)),
        EndRecord(key=its_key, num_blocks=2, payload_bytes=9, first_token=token(rng)),
        NackRecord(kind=rng.choice(("TransferFailed", "LeaseExpired")), reason="order", message="m"),
        AbortRecord(reason="cancelled"),
    )
    data = msgspec.msgpack.encode(values[kind])
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        data = spoilt_record(rng, data) if rng.random() < 0.7 else spoilt_bytes(rng, data)
    if rng.random() < 0.001:
        data = rng.choice((b"\x80", b"\x90", b"\xc0", b"\x01", b"\x91", b"\x81\x00")) * rng.randrange(200_000)
    return (bytes([kind]) + data,)


def read_record(case: Case) -> str:
    kind, data = case[0][0], case[0][1:]
    try:
        record = _READERS[kind](data)
    except ProtocolMismatch as error:
        return f"{kind} {error.reason}"
    if isinstance(record, LayerHeader):
        cursor = TransferCursor(record.layer + 1)
        cursor.layer = record.layer - 1
        try:
            cursor.pass_layer(0, record)
        except TransferFailed as error:
            return f"{kind} {error.reason}"
        assert 0 <= cursor.layer_bytes <= 2**48
    return f"{kind} read"


# ---- control messages ------------------------------------------------------------------------------------

_NAMES = sorted(CODECS)


def filled(rng: Random, kind: type[Message], depth: int = 4) -> Message:
    """A protobuf message with most of its fields."""
    message = kind()
    described: Any = message.DESCRIPTOR
    for field in described.fields:
        if rng.random() < 0.03 or (field.message_type is not None and not depth):
            continue
        target = getattr(message, field.name)
        count = rng.choice((0, 1, 3)) if field.is_repeated else 1
        for _ in range(count):
            if field.message_type is None:
                value = _scalar(rng, field)
                if field.is_repeated:
                    target.append(value)
                else:
                    setattr(message, field.name, value)
            elif field.message_type.GetOptions().map_entry:
                entry = filled(rng, field.message_type._concrete_class, depth - 1)
                inner = entry.DESCRIPTOR.fields_by_name["value"].message_type
                name: Any = getattr(entry, "key")  # noqa: B009
                if inner is None:
                    target[name] = getattr(entry, "value")  # noqa: B009
                else:
                    target[name].CopyFrom(getattr(entry, "value"))  # noqa: B009
            else:
                part = filled(rng, field.message_type._concrete_class, depth - 1)
                target.add().CopyFrom(part) if field.is_repeated else target.CopyFrom(part)
    return message


def _scalar(rng: Random, field: Any) -> Any:
    if field.enum_type is not None:
        numbers = [value.number for value in field.enum_type.values]
        return rng.choice(numbers[1:]) if rng.random() < 0.95 else rng.choice((0, 99))
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            text = rng.choice(TEXTS)
            return text.encode() if field.type == field.TYPE_BYTES else text
        case field.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
            return rng.choice((0.0, 0.5, -1.0, 1e308, float("inf"), float("nan")))
        case field.CPPTYPE_INT32:
            return rng.choice((0, 1, -1, 2**31 - 1))
        case field.CPPTYPE_UINT32:
            return rng.choice((0, 1, 2**32 - 1))
        case field.CPPTYPE_UINT64:
            return rng.choice((0, 1, 2**64 - 1))
        case _:
            return rng.choice((0, 1, -1, 2**63 - 1, -(2**63)))


def make_control(rng: Random) -> Case:
    """A control message's name, a space, and the message with its seal."""
    name = rng.choice(_NAMES)
    message = filled(rng, getattr(pb, name)).SerializeToString()
    for _ in range(rng.choice((0, 1, 1, 3))):
        message = spoilt_bytes(rng, message)
    data = Seal("/m", "r").close(message)
    return (name.encode() + b" " + (spoilt_bytes(rng, data) if rng.random() < 0.1 else data),)


def read_control(case: Case) -> str:
    kind, _, data = case[0].partition(b" ")
    name = kind.decode()
    codec = CODECS[name]
    try:
        value = codec.decode(Seal("/m", "r").open(data))
    except (InvalidRequest, WorkerUnavailable) as error:
        return f"{name} {error.reason}"
    try:
        again = codec.decode(codec.encode(value))
    except KvferryError as error:
        return f"{name} {error.reason} when written again"
    # NaN differs from itself, and maps have no order.
    assert again == value or sorted(repr(again)) == sorted(repr(value))
    return f"{name} read"


def frames_target() -> Target:
    receiver = _Frames()
    return Target(name="frames", make=receiver.make, read=receiver.read, max_bytes=(96, 256 << 10))


def records_target() -> Target:
    return Target(name="records", make=make_record, read=read_record, max_bytes=(160, 64 << 10))


def control_target() -> Target:
    return Target(name="control", make=make_control, read=read_control, max_bytes=(160, 256 << 10))
