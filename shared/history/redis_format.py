"""The format of history in Redis: keys, chunk values and the session's record.

All keys of a session share a hash tag, so that a cluster stores them on one node:

    kvferry:history:1:{<owner>/<session id>}:record              record: header, body (MessagePack)
    kvferry:history:1:{<owner>/<session id>}:segments            hash: segment id -> values per layer
    kvferry:history:1:{<owner>/<session id>}:<segment>:<layer>:<i>   chunk: header, tensors
    kvferry:history:1:{owner:<owner>}:bytes | :expiry            sizes of the owner's sessions
    kvferry:history:1:{total}:bytes | :expiry                    sizes of the owners

Headers are little-endian, of fixed size, versioned; a checksum (XXH3-64) covers header and payload. A value
that is not exactly what its reader expects is a HistoryMiss, reason "corrupt".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.rows import RowChunk, RowPrecision

FORMAT_VERSION = 1
TOKEN_BYTES = 16
TOKEN_OFFSET = 8
"""Offset of a record's fencing token, which the commit script compares."""

_PREFIX = f"kvferry:history:{FORMAT_VERSION}:"
_CHUNK_MAGIC, _RECORD_MAGIC = b"KVFc", b"KVFr"
# magic, version, precision, group offset, layer, H_kv, D, 0, tokens, first token in the segment, segment,
# payload bytes; then the checksum
_CHUNK = struct.Struct("<4sHBBHHHHII16sQ")
# magic, version, 0, fencing token, body bytes, 0; then the checksum
_RECORD = struct.Struct("<4sHH16sII")
_CHECKSUM = struct.Struct("<Q")
CHUNK_HEADER_BYTES = _CHUNK.size + _CHECKSUM.size
RECORD_HEADER_BYTES = _RECORD.size + _CHECKSUM.size
_MAX_RECORD_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """What every chunk of a model's history has in common."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    precision: RowPrecision


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


class RecordBody(msgspec.Struct, frozen=True, array_like=True):
    """A session's committed history in Redis.

    Attributes:
        precision: `RowPrecision.code` of all its values.
        method: compression method of the turn that committed it.
        turn: how many turns were committed, including this one.
        token_ids: uint32, little-endian.
    """

    owner: str
    session_id: str
    fingerprint: str
    precision: int
    method: str
    turn: int
    token_ids: bytes
    segments: tuple[SegmentEntry, ...]


@dataclass(frozen=True, kw_only=True)
class RemoteRecord:
    """A record as read. `fence`: its fencing token; a commit replaces only the record that has its base's."""

    fence: bytes
    body: RecordBody
    token_ids: tuple[int, ...]
    size_bytes: int

    @property
    def segments(self) -> tuple[SegmentEntry, ...]:
        return self.body.segments


def session_prefix(session: SessionKey) -> str:
    return f"{_PREFIX}{{{session.owner}/{session.session_id}}}:"


def record_key(session: SessionKey) -> str:
    return f"{session_prefix(session)}record"


def segments_key(session: SessionKey) -> str:
    return f"{session_prefix(session)}segments"


def value_keys(session: SessionKey, segment_id: bytes, layer: int, num_values: int) -> list[str]:
    prefix = f"{session_prefix(session)}{segment_id.hex()}:{layer}:"
    return [f"{prefix}{index}" for index in range(num_values)]


def owner_keys(owner: str) -> tuple[str, str]:
    """Keys of an owner's sizes (hash) and expiries (sorted set), by session id."""
    return f"{_PREFIX}{{owner:{owner}}}:bytes", f"{_PREFIX}{{owner:{owner}}}:expiry"


def total_keys() -> tuple[str, str]:
    """The same over owners."""
    return f"{_PREFIX}{{total}}:bytes", f"{_PREFIX}{{total}}:expiry"


def write_chunk(
    chunk: RowChunk, *, shape: RowShape, segment_id: bytes, layer: int, first_token: int
) -> bytes:
    """A chunk as a value."""
    payload = [_tensor_bytes(tensor) for tensor in chunk.tensors]
    header = _CHUNK.pack(
        _CHUNK_MAGIC, FORMAT_VERSION, shape.precision.code, chunk.group_offset, layer, shape.num_kv_heads,
        shape.head_dim, 0, chunk.num_tokens, first_token, segment_id, sum(map(len, payload)),
    )  # fmt: skip
    return b"".join([header, _CHECKSUM.pack(_checksum(header, *payload)), *payload])


def read_chunk(
    value: bytes, *, shape: RowShape, segment_id: bytes, layer: int, first_token: int, num_tokens: int
) -> RowChunk:
    """The chunk that a value must contain, in memory of its own.

    Raises: HistoryMiss, reason "corrupt": the value is a different one, or damaged.
    """
    what = f"history value {segment_id.hex()}:{layer} at token {first_token}"
    if len(value) < CHUNK_HEADER_BYTES:
        raise _corrupt(f"{what} has {len(value)} bytes, fewer than its header")
    header = value[: _CHUNK.size]
    group_offset = header[7]
    shapes = shape.precision.shapes(
        num_tokens=num_tokens, group_offset=group_offset, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )  # fmt: skip
    sizes = [_size_bytes(dims, dtype) for dims, dtype in shapes]
    expected = _CHUNK.pack(
        _CHUNK_MAGIC, FORMAT_VERSION, shape.precision.code, group_offset, layer, shape.num_kv_heads,
        shape.head_dim, 0, num_tokens, first_token, segment_id, sum(sizes),
    )  # fmt: skip
    payload = memoryview(value)[CHUNK_HEADER_BYTES:]
    if header != expected or len(payload) != sum(sizes):
        raise _corrupt(f"{what} is not what its record names")
    if _CHECKSUM.unpack_from(value, _CHUNK.size)[0] != _checksum(header, payload):
        raise _corrupt(f"{what} fails its checksum")
    tensors, offset = [], 0
    for (dims, dtype), size_bytes in zip(shapes, sizes, strict=True):
        tensors.append(_tensor(payload[offset : offset + size_bytes], dims, dtype))
        offset += size_bytes
    return shape.precision.chunk(tensors, group_offset=group_offset, head_dim=shape.head_dim)


def write_record(fence: bytes, body: RecordBody) -> bytes:
    assert len(fence) == TOKEN_BYTES, fence
    encoded = msgspec.msgpack.encode(body)
    header = _RECORD.pack(_RECORD_MAGIC, FORMAT_VERSION, 0, fence, len(encoded), 0)
    return b"".join([header, _CHECKSUM.pack(_checksum(header, encoded)), encoded])


def read_record(value: bytes, session: SessionKey) -> RemoteRecord:
    """Raises: HistoryMiss, reason "corrupt"."""
    what = f"history record of session {session.session_id!r}"
    if not RECORD_HEADER_BYTES <= len(value) <= _MAX_RECORD_BYTES:
        raise _corrupt(f"{what} has {len(value)} bytes")
    magic, version, _, fence, num_bytes, _ = _RECORD.unpack_from(value)
    encoded = memoryview(value)[RECORD_HEADER_BYTES:]
    if (magic, version, num_bytes) != (_RECORD_MAGIC, FORMAT_VERSION, len(encoded)):
        raise _corrupt(f"{what} has an unknown format")
    if _CHECKSUM.unpack_from(value, _RECORD.size)[0] != _checksum(value[: _RECORD.size], encoded):
        raise _corrupt(f"{what} fails its checksum")
    try:
        body = msgspec.msgpack.decode(encoded, type=RecordBody)
    except msgspec.MsgspecError as error:
        raise _corrupt(f"{what}: {error}") from None
    if len(body.token_ids) % 4 or (body.owner, body.session_id) != (session.owner, session.session_id):
        raise _corrupt(f"{what} is another session's")
    token_ids = tuple(np.frombuffer(body.token_ids, "<u4").tolist())
    for entry in body.segments:
        if len(entry.segment_id) != TOKEN_BYTES or not 0 < entry.length <= sum(entry.value_tokens):
            raise _corrupt(f"{what} names an impossible segment")
    if sum(entry.length for entry in body.segments) != len(token_ids):
        raise _corrupt(f"{what} has other tokens than its segments")
    size_bytes = len(value) + sum(entry.size_bytes for entry in body.segments)
    return RemoteRecord(fence=fence, body=body, token_ids=token_ids, size_bytes=size_bytes)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, "<u4").tobytes()


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes; not copied if it is contiguous."""
    array: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)


def _tensor(payload: memoryview, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(dims, dtype=dtype)
    tensor.flatten().view(torch.uint8).numpy()[:] = np.frombuffer(payload, np.uint8)
    return tensor


def _size_bytes(dims: tuple[int, ...], dtype: torch.dtype) -> int:
    return int(np.prod(dims)) * dtype.itemsize


def _checksum(*parts: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _corrupt(message: str) -> HistoryMiss:
    return HistoryMiss(message, reason="corrupt")
