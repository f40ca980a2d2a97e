"""The format of history behind host memory: a session's record, and the values that have its rows.

A record names segments, each what one turn added, and checkpoints. A segment has the same values in every
layer, each a chunk of consecutive tokens' rows. A checkpoint has one value for each layer with a state. A
value begins with a header, a record with a header and a MessagePack body. Headers are little-endian, of fixed
size, versioned; a checksum (XXH3-64) covers header and payload. Bytes that are not exactly what their reader
expects are a HistoryMiss, reason "corrupt". With keys (`at_rest.py`), records and values are sealed whole;
what does not open is a HistoryMiss, reason "key". Where records and values are stored, and how they are
published, is the storages' concern.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.checkpoints import LayerState
from kvferry.shared.history.rows import RowChunk, RowPrecision, part_of
from kvferry.shared.model.spec import TORCH_DTYPES, Heads, StateSpec
from kvferry.shared.trust.at_rest import (
    LABEL_BYTES,
    LABEL_OFFSET,
    SEALED_BYTES,
    AtRestKeys,
    Unreadable,
    open_with,
)

FORMAT_VERSION = 1
FENCE_BYTES = LABEL_BYTES
FENCE_OFFSET = LABEL_OFFSET
"""Where a record has its fencing token, sealed or not."""

_CHUNK_MAGIC, _RECORD_MAGIC, _STATE_MAGIC = b"KVFc", b"KVFr", b"KVFs"
# magic, version, precision, group offset, layer, H_kv, D, 0, tokens, first token in the segment, segment,
# payload bytes; then the checksum
_CHUNK = struct.Struct("<4sHBBHHHHII16sQ")
# magic, version, 0, fencing token, body bytes, 0; then the checksum
_RECORD = struct.Struct("<4sHH16sII")
# magic, version, 0, layer, checkpoint, payload bytes; then the checksum
_STATE = struct.Struct("<4sHHH16sQ")
_CHECKSUM = struct.Struct("<Q")
CHUNK_HEADER_BYTES = _CHUNK.size + _CHECKSUM.size
STATE_HEADER_BYTES = _STATE.size + _CHECKSUM.size
RECORD_HEADER_BYTES = _RECORD.size + _CHECKSUM.size
_MAX_RECORD_BYTES = 256 << 20


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True):
    """A segment as a record names it.

    Attributes:
        segment_id: 16 random bytes.
        length: its tokens that the record uses, from its first.
        value_tokens: tokens of each of a layer's values; the same in every layer.
        size_bytes: of all its values, whole.
    """

    segment_id: bytes
    length: int
    value_tokens: tuple[int, ...]
    size_bytes: int


class CheckpointEntry(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint as a record names it; see `Checkpoint`.

    Attributes:
        checkpoint_id: 16 random bytes.
        size_bytes: of all its values.
    """

    checkpoint_id: bytes
    num_tokens: int
    ends_turn: bool
    size_bytes: int


class RecordBody(msgspec.Struct, frozen=True, array_like=True):
    """A session's committed history.

    Attributes:
        precision: `RowPrecision.code` of all its values.
        method: compression method of the turn that committed it.
        turn: how many turns were committed, including this one.
        token_ids: uint32, little-endian.
        num_exact_tokens: see `StoredRecord`; 0 in a record that an earlier version wrote.
    """

    owner: str
    session_id: str
    fingerprint: str
    precision: int
    method: str
    turn: int
    token_ids: bytes
    segments: tuple[SegmentEntry, ...]
    checkpoints: tuple[CheckpointEntry, ...] = ()
    num_exact_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class TierRecord:
    """A record as read. `fence`: its fencing token; a commit replaces only the record that has its base's."""

    fence: bytes
    body: RecordBody
    token_ids: tuple[int, ...]
    size_bytes: int

    @property
    def segments(self) -> tuple[SegmentEntry, ...]:
        return self.body.segments

    @property
    def num_exact_tokens(self) -> int:
        return self.body.num_exact_tokens


@dataclass(frozen=True, kw_only=True)
class StoredShape:
    """What all stored history of a worker has in common.

    Attributes:
        fingerprint: of the model.
        heads: of each layer with rows, which are numbered without the others.
        states: of each layer with a state, by its number in the model.
        keys: that encrypt it; None: it is not encrypted.
    """

    fingerprint: str
    heads: tuple[Heads, ...]
    precision: RowPrecision
    states: Mapping[int, tuple[StateSpec, ...]] = field(default_factory=dict)
    keys: AtRestKeys | None = None

    @property
    def num_layers(self) -> int:
        """Layers with rows."""
        return len(self.heads)

    @property
    def chunk_header_bytes(self) -> int:
        """Bytes of a value beside its chunk's."""
        return CHUNK_HEADER_BYTES + self._sealed_bytes

    @property
    def state_header_bytes(self) -> int:
        """Bytes of a value beside its state's."""
        return STATE_HEADER_BYTES + self._sealed_bytes

    @property
    def _sealed_bytes(self) -> int:
        return SEALED_BYTES if self.keys is not None else 0

    def sealed(self, session: SessionKey, value: bytes, label: bytes) -> bytes:
        """Return a record or value as it is stored. Args: label: the record's fence, or the id of the segment
        or checkpoint of the value."""
        if self.keys is None:
            return value
        return self.keys.seal(session.owner, value, context=session.session_id, label=label)

    def opened(self, session: SessionKey, value: bytes) -> bytes:
        """Open what was sealed. Raises: HistoryMiss, reason "key"."""
        try:
            return open_with(self.keys, session.owner, value, context=session.session_id)
        except Unreadable as error:
            raise HistoryMiss(
                f"stored history of session {session.session_id!r} cannot be decrypted: {error}", reason="key"
            ) from None

    def serves(self, record: TierRecord) -> bool:
        """Say whether a record's rows are of this model, in the precision that this worker stores."""
        return (record.body.fingerprint, record.body.precision) == (self.fingerprint, self.precision.code)


def write_chunk(
    chunk: RowChunk, *, shape: StoredShape, segment_id: bytes, layer: int, first_token: int
) -> bytes:
    payload = [_tensor_bytes(tensor) for tensor in chunk.tensors]
    heads = shape.heads[layer]
    header = _CHUNK.pack(
        _CHUNK_MAGIC, FORMAT_VERSION, shape.precision.code, chunk.group_offset, layer, heads.num_kv_heads,
        heads.head_dim, 0, chunk.num_tokens, first_token, segment_id, sum(map(len, payload)),
    )  # fmt: skip
    return b"".join([header, _CHECKSUM.pack(_checksum(header, *payload)), *payload])


def read_chunk(
    value: bytes, *, shape: StoredShape, segment_id: bytes, layer: int, first_token: int, num_tokens: int
) -> RowChunk:
    """Read the chunk that a value must contain, into memory of its own.

    Raises: HistoryMiss, reason "corrupt": the value is a different one, or damaged.
    """
    what = f"history value {segment_id.hex()}:{layer} at token {first_token}"
    if len(value) < CHUNK_HEADER_BYTES:
        raise corrupt(f"{what} has {len(value)} bytes, fewer than its header")
    header = value[: _CHUNK.size]
    group_offset, heads = header[7], shape.heads[layer]
    shapes = shape.precision.shapes(
        num_tokens=num_tokens, group_offset=group_offset, num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
    )  # fmt: skip
    sizes = [int(np.prod(dims)) * dtype.itemsize for dims, dtype in shapes]
    expected = _CHUNK.pack(
        _CHUNK_MAGIC, FORMAT_VERSION, shape.precision.code, group_offset, layer, heads.num_kv_heads,
        heads.head_dim, 0, num_tokens, first_token, segment_id, sum(sizes),
    )  # fmt: skip
    payload = memoryview(value)[CHUNK_HEADER_BYTES:]
    if header != expected or len(payload) != sum(sizes):
        raise corrupt(f"{what} is not what its record names")
    if _CHECKSUM.unpack_from(value, _CHUNK.size)[0] != _checksum(header, payload):
        raise corrupt(f"{what} fails its checksum")
    tensors, offset = [], 0
    for (dims, dtype), size_bytes in zip(shapes, sizes, strict=True):
        tensor = torch.empty(dims, dtype=dtype)
        _tensor_bytes(tensor)[:] = payload[offset : offset + size_bytes]
        tensors.append(tensor)
        offset += size_bytes
    return shape.precision.chunk(tensors, group_offset=group_offset, head_dim=heads.head_dim)


def write_state(state: LayerState, *, checkpoint_id: bytes, layer: int) -> bytes:
    payload = [_tensor_bytes(tensor) for tensor in state.values()]
    header = _STATE.pack(_STATE_MAGIC, FORMAT_VERSION, 0, layer, checkpoint_id, sum(map(len, payload)))
    return b"".join([header, _CHECKSUM.pack(_checksum(header, *payload)), *payload])


def read_state(
    value: bytes | None, session: SessionKey, *, shape: StoredShape, checkpoint_id: bytes, layer: int
) -> dict[str, Tensor]:
    """Read the state that a stored value must contain, into memory of its own.

    Raises: HistoryMiss, reason "evicted" (the value is None), "key" or "corrupt".
    """
    what = f"state {checkpoint_id.hex()}:{layer}"
    if value is None:
        raise HistoryMiss(f"{what} is lost", reason="evicted")
    value = shape.opened(session, value)
    specs = shape.states[layer]
    size_bytes = sum(spec.size_bytes for spec in specs)
    header = _STATE.pack(_STATE_MAGIC, FORMAT_VERSION, 0, layer, checkpoint_id, size_bytes)
    payload = memoryview(value)[STATE_HEADER_BYTES:]
    if value[: _STATE.size] != header or len(payload) != size_bytes:
        raise corrupt(f"{what} is not what its record names")
    if _CHECKSUM.unpack_from(value, _STATE.size)[0] != _checksum(header, payload):
        raise corrupt(f"{what} fails its checksum")
    state, offset = {}, 0
    for spec in specs:
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        _tensor_bytes(tensor)[:] = payload[offset : offset + spec.size_bytes]
        state[spec.name], offset = tensor, offset + spec.size_bytes
    return state


@dataclass(frozen=True, kw_only=True)
class WantedValue:
    """The value number `index` of a segment's layer, of which tokens [low, high) are wanted."""

    entry: SegmentEntry
    index: int
    first_token: int
    num_tokens: int
    low: int
    high: int


def wanted_values(record: TierRecord, start: int, stop: int) -> Iterator[WantedValue]:
    """Yield the values of each layer that have tokens [start, stop) of a record."""
    position = 0
    for entry in record.segments:
        first_token = 0
        for index, num_tokens in enumerate(entry.value_tokens):
            begin = position + first_token
            low = max(0, start - begin)
            high = min(num_tokens, entry.length - first_token, stop - begin)
            if low < high:
                yield WantedValue(
                    entry=entry, index=index, first_token=first_token, num_tokens=num_tokens, low=low,
                    high=high,
                )  # fmt: skip
            first_token += num_tokens
        position += entry.length


def read_values(
    session: SessionKey,
    wanted: Iterable[WantedValue],
    values: Iterable[bytes | None],
    *,
    shape: StoredShape,
    layer: int,
) -> list[RowChunk]:
    """Read a layer's wanted rows from stored values.

    Raises: HistoryMiss, reason "evicted" (a value is None), "key" or "corrupt".
    """
    chunks: list[RowChunk] = []
    for want, value in zip(wanted, values, strict=True):
        segment_id = want.entry.segment_id
        if value is None:
            raise HistoryMiss(f"value {want.index} of segment {segment_id.hex()} is lost", reason="evicted")
        chunk = read_chunk(
            shape.opened(session, value),
            shape=shape,
            segment_id=segment_id,
            layer=layer,
            first_token=want.first_token,
            num_tokens=want.num_tokens,
        )
        chunks += part_of([chunk], want.low, want.high)
    return chunks


def write_record(fence: bytes, body: RecordBody) -> bytes:
    assert len(fence) == FENCE_BYTES, fence
    encoded = msgspec.msgpack.encode(body)
    header = _RECORD.pack(_RECORD_MAGIC, FORMAT_VERSION, 0, fence, len(encoded), 0)
    return b"".join([header, _CHECKSUM.pack(_checksum(header, encoded)), encoded])


def read_record(value: bytes, session: SessionKey) -> TierRecord:
    """Read a session's record. Raises: HistoryMiss, reason "corrupt"."""
    what = f"history record of session {session.session_id!r}"
    if not RECORD_HEADER_BYTES <= len(value) <= _MAX_RECORD_BYTES:
        raise corrupt(f"{what} has {len(value)} bytes")
    magic, version, _, fence, num_bytes, _ = _RECORD.unpack_from(value)
    encoded = memoryview(value)[RECORD_HEADER_BYTES:]
    if (magic, version, num_bytes) != (_RECORD_MAGIC, FORMAT_VERSION, len(encoded)):
        raise corrupt(f"{what} has an unknown format")
    if _CHECKSUM.unpack_from(value, _RECORD.size)[0] != _checksum(value[: _RECORD.size], encoded):
        raise corrupt(f"{what} fails its checksum")
    try:
        body = msgspec.msgpack.decode(encoded, type=RecordBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise corrupt(f"{what}: {error}") from None
    if len(body.token_ids) % 4 or (body.owner, body.session_id) != (session.owner, session.session_id):
        raise corrupt(f"{what} is another session's")
    token_ids = np.frombuffer(body.token_ids, "<u4").tolist()
    for entry in body.segments:
        is_whole = 0 < entry.length <= sum(entry.value_tokens) and min(entry.value_tokens) > 0
        if len(entry.segment_id) != FENCE_BYTES or entry.size_bytes < 0 or not is_whole:
            raise corrupt(f"{what} names an impossible segment")
    if sum(entry.length for entry in body.segments) != len(token_ids):
        raise corrupt(f"{what} has other tokens than its segments")
    for checkpoint in body.checkpoints:
        is_inside = 0 < checkpoint.num_tokens <= len(token_ids) and checkpoint.size_bytes >= 0
        if len(checkpoint.checkpoint_id) != FENCE_BYTES or not is_inside:
            raise corrupt(f"{what} names an impossible checkpoint")
    return tier_record(fence, body, token_ids, len(value))


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, "<u4").tobytes()


def corrupt(message: str) -> HistoryMiss:
    return HistoryMiss(message, reason="corrupt")


def tier_record(fence: bytes, body: RecordBody, token_ids: Sequence[int], num_bytes: int) -> TierRecord:
    size_bytes = num_bytes + sum(entry.size_bytes for entry in body.segments)
    size_bytes += sum(entry.size_bytes for entry in body.checkpoints)
    return TierRecord(fence=fence, body=body, token_ids=tuple(token_ids), size_bytes=size_bytes)


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes; not copied if it is contiguous. NumPy copies in this thread alone, where torch
    would take every core from the model."""
    rows = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    array: Any = np.ascontiguousarray(rows.view(torch.uint8).numpy())
    return memoryview(array.reshape(-1))


def _checksum(*parts: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
