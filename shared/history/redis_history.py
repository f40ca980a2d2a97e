"""Sessions' history in Redis: values first, the record last, in one atomic commit that the turn's base
permits.

    write: reserve quota ──► values of a new segment ──► commit script (is the fence the base's?) ──► remove
        old values
                                  │ any failure                       │ no: SessionBusy
                                  └──────── new values removed ◄──────┘
    read:  record ──► a layer's values in one call; one that is missing or damaged is a HistoryMiss

Behind host memory (`tiered.py`), which has the rows and decides what is written.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss, KvferryError, SessionBusy
from kvferry.shared.history.redis_client import Client, RedisLink
from kvferry.shared.history.redis_format import (
    CHUNK_HEADER_BYTES,
    TOKEN_BYTES,
    TOKEN_OFFSET,
    RecordBody,
    RemoteRecord,
    RowShape,
    SegmentEntry,
    pack_token_ids,
    read_chunk,
    read_record,
    record_key,
    segments_key,
    value_keys,
    write_chunk,
    write_record,
)
from kvferry.shared.history.redis_quota import RedisQuota
from kvferry.shared.history.rows import RowChunk, part_of

VALUE_BYTES = 4 << 20
"""Rows in one value, at most; but a value has at least one token."""
_BATCH_BYTES = 8 << 20
# Values outlive their record: a record that exists names values that exist.
_VALUE_GRACE_S = 60.0

_COMMIT = f"""
local fence = redis.call('GETRANGE', KEYS[1], {TOKEN_OFFSET}, {TOKEN_OFFSET + TOKEN_BYTES - 1})
if fence ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""

_Part = tuple[int, RowChunk]
"""A value's first token in its segment, and its rows."""


class RedisHistory:
    """Thread-safe. Every method raises StoreUnavailable as `RedisLink.call` does."""

    def __init__(
        self,
        link: RedisLink,
        quota: RedisQuota,
        *,
        shape: RowShape,
        fingerprint: str,
        ttl_s: float,
        value_bytes: int = VALUE_BYTES,
    ) -> None:
        """Args:
        fingerprint: of the model; records of another model are ignored, and replaced.
        ttl_s: a session is deleted after this long without a turn.
        """
        self._link = link
        self._quota = quota
        self._shape = shape
        self._fingerprint = fingerprint
        self._ttl_ms = int(ttl_s * 1000)
        self._value_ttl_ms = int((ttl_s + _VALUE_GRACE_S) * 1000)
        self._value_bytes = value_bytes

    @property
    def size_bytes(self) -> int:
        """What all sessions of all owners took when this worker last wrote or deleted."""
        return self._quota.total_bytes

    @property
    def num_layers(self) -> int:
        return self._shape.num_layers

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._link.close()

    # ---- reading -----------------------------------------------------------------------------------------

    def record(self, session: SessionKey) -> RemoteRecord | None:
        """The session's committed record. Raises: HistoryMiss, reason "corrupt"."""
        value = self._link.call(lambda client: client.get(record_key(session)))
        return read_record(value, session) if value is not None else None

    def serves(self, record: RemoteRecord) -> bool:
        """Whether a record's rows are of this model, in the precision that this worker stores."""
        mine = (self._fingerprint, self._shape.precision.code)
        return (record.body.fingerprint, record.body.precision) == mine

    def load(
        self, session: SessionKey, record: RemoteRecord, layer: int, start: int, stop: int
    ) -> list[RowChunk]:
        """A layer's rows of tokens [start, stop). Raises: HistoryMiss, reason "evicted" or "corrupt"."""
        wanted = list(_values_between(session, record.segments, layer, start, stop))
        values = self._link.call(lambda client: client.mget([key for key, *_ in wanted]))
        chunks: list[RowChunk] = []
        for (key, entry, first_token, num_tokens, low, high), value in zip(wanted, values, strict=True):
            if value is None:
                raise HistoryMiss(f"Redis has lost {key}", reason="evicted")
            chunk = read_chunk(
                value, shape=self._shape, segment_id=entry.segment_id, layer=layer,
                first_token=first_token, num_tokens=num_tokens,
            )  # fmt: skip
            chunks += part_of([chunk], low, high)
        return chunks

    # ---- writing -----------------------------------------------------------------------------------------

    def write(
        self,
        session: SessionKey,
        *,
        base: RemoteRecord | None,
        num_base_tokens: int,
        token_ids: Sequence[int],
        layers: Sequence[Sequence[RowChunk]],
        method: str,
    ) -> RemoteRecord:
        """Publish `token_ids`: the base's first `num_base_tokens`, then a new segment of `layers`' rows.

        Raises:
            SessionBusy: the session's record is no longer the base.
            HistoryMiss: the base or some of its values are gone, so that it cannot be continued.
            StoreUnavailable: also with reason "quota".
        """
        old = _first_entries(base.segments, num_base_tokens) if base is not None else ()
        entry, parts = self._new_segment(layers)
        body = RecordBody(
            owner=session.owner,
            session_id=session.session_id,
            fingerprint=self._fingerprint,
            precision=self._shape.precision.code,
            method=method,
            turn=base.body.turn + 1 if base is not None else 1,
            token_ids=pack_token_ids(token_ids),
            segments=(*old, entry),
        )
        fence = secrets.token_bytes(TOKEN_BYTES)
        value = write_record(fence, body)
        size_bytes = len(value) + sum(segment.size_bytes for segment in body.segments)
        for victim in self._quota.reserve(session, size_bytes):
            self.delete(victim)
        try:
            self._extend(session, old)
            self._put(session, entry, parts)
            self._commit(session, base.fence if base is not None else b"", value)
        except KvferryError:
            self._undo(session, entry, base)
            raise
        self._collect(session, {segment.segment_id for segment in body.segments}, base)
        return RemoteRecord(fence=fence, body=body, token_ids=tuple(token_ids), size_bytes=size_bytes)

    def touch(self, session: SessionKey, record: RemoteRecord) -> None:
        """Restart the session's time to live. Raises: HistoryMiss: values of it are gone."""
        self._quota.reserve(session, record.size_bytes)
        self._extend(session, record.segments)
        self._link.call(lambda client: client.pexpire(record_key(session), self._ttl_ms))

    def delete(self, session: SessionKey) -> None:
        """Remove a session's record, then all its values, including those of unfinished writes."""
        record: RemoteRecord | None = None
        with contextlib.suppress(HistoryMiss):  # unreadable: the index of segments still names its values
            record = self.record(session)
        self._link.call(lambda client: client.unlink(record_key(session)))
        self._remove(session, self._indexed(session) | _num_values(record))
        self._link.call(lambda client: client.unlink(segments_key(session)))
        self._quota.release(session)

    def _new_segment(self, layers: Sequence[Sequence[RowChunk]]) -> tuple[SegmentEntry, list[list[_Part]]]:
        """A segment of these rows, and its values of each layer."""
        num_tokens = sum(chunk.num_tokens for chunk in layers[0])
        layer_bytes = max(sum(chunk.size_bytes for chunk in chunks) for chunks in layers)
        value_tokens = _value_tokens(layers, max(1, self._value_bytes * num_tokens // max(1, layer_bytes)))
        parts = [list(_cut(chunks, value_tokens)) for chunks in layers]
        entry = SegmentEntry(
            segment_id=secrets.token_bytes(TOKEN_BYTES),
            length=num_tokens,
            value_tokens=value_tokens,
            size_bytes=sum(CHUNK_HEADER_BYTES + chunk.size_bytes for layer in parts for _, chunk in layer),
        )
        return entry, parts

    def _extend(self, session: SessionKey, entries: Iterable[SegmentEntry]) -> None:
        """Restart the time to live of segments that the new record names as well."""
        keys = [
            key for entry in entries for key in self._keys(session, entry.segment_id, len(entry.value_tokens))
        ]

        def expire(pipeline: Client) -> None:
            for key in keys:
                pipeline.pexpire(key, self._value_ttl_ms)

        if keys and not all(self._link.pipeline(expire)):
            raise HistoryMiss(f"Redis has lost values of session {session.session_id!r}", reason="evicted")

    def _put(self, session: SessionKey, entry: SegmentEntry, parts: Sequence[Sequence[_Part]]) -> None:
        index = segments_key(session)

        def announce(pipeline: Client) -> None:
            pipeline.hset(index, entry.segment_id.hex(), len(entry.value_tokens))
            pipeline.pexpire(index, self._value_ttl_ms)

        self._link.pipeline(announce)
        batch: dict[str, bytes] = {}

        def put(pipeline: Client) -> None:
            for key, value in batch.items():
                pipeline.set(key, value, px=self._value_ttl_ms)

        size_bytes = 0
        for key, value in self._values(session, entry, parts):
            batch[key] = value
            size_bytes += len(value)
            if size_bytes >= _BATCH_BYTES:
                self._link.pipeline(put)
                batch.clear()
                size_bytes = 0
        if batch:
            self._link.pipeline(put)

    def _values(
        self, session: SessionKey, entry: SegmentEntry, parts: Sequence[Sequence[_Part]]
    ) -> Iterator[tuple[str, bytes]]:
        for layer, values in enumerate(parts):
            keys = value_keys(session, entry.segment_id, layer, len(values))
            for key, (first_token, chunk) in zip(keys, values, strict=True):
                yield key, write_chunk(
                    chunk, shape=self._shape, segment_id=entry.segment_id, layer=layer,
                    first_token=first_token,
                )  # fmt: skip

    def _commit(self, session: SessionKey, fence: bytes, value: bytes) -> None:
        key = record_key(session)
        # A retry of a commit whose answer was lost finds its own record, and counts as done.
        mine = value[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES]

        def commit(client: Client) -> Any:
            if client.eval(_COMMIT, 1, key, fence, value, self._ttl_ms):
                return mine
            return client.getrange(key, TOKEN_OFFSET, TOKEN_OFFSET + TOKEN_BYTES - 1)

        found = self._link.call(commit)
        if found == b"":
            raise HistoryMiss(
                f"Redis has lost the record of session {session.session_id!r}", reason="evicted"
            )
        if found != mine:
            raise SessionBusy(f"session {session.session_id!r} was changed by another turn", reason="fenced")

    def _undo(self, session: SessionKey, entry: SegmentEntry, base: RemoteRecord | None) -> None:
        """Clean up after a failed write; what cannot be removed now expires."""
        with contextlib.suppress(KvferryError):
            self._remove(session, {entry.segment_id: len(entry.value_tokens)})
            if base is not None:
                self._quota.reserve(session, base.size_bytes)
            else:
                self._quota.release(session)

    def _collect(self, session: SessionKey, named: set[bytes], base: RemoteRecord | None) -> None:
        """Remove segments that the new record does not name; what cannot be removed now expires."""
        with contextlib.suppress(KvferryError):
            stored = self._indexed(session) | _num_values(base)  # the index may have been evicted
            self._remove(session, {key: count for key, count in stored.items() if key not in named})

    def _indexed(self, session: SessionKey) -> dict[bytes, int]:
        """Values per layer by segment, including unfinished writes."""
        index = self._link.call(lambda client: client.hgetall(segments_key(session)))
        return {bytes.fromhex(name.decode()): int(count) for name, count in index.items()}

    def _remove(self, session: SessionKey, segments: Mapping[bytes, int]) -> None:
        for segment_id, num_values in segments.items():

            def remove(pipeline: Client, segment_id: bytes = segment_id, count: int = num_values) -> None:
                for key in self._keys(session, segment_id, count):  # one each: a cluster's pipeline wants it
                    pipeline.unlink(key)
                pipeline.hdel(segments_key(session), segment_id.hex())

            self._link.pipeline(remove)

    def _keys(self, session: SessionKey, segment_id: bytes, num_values: int) -> list[str]:
        """Keys of a segment's values in all layers."""
        layers = range(self._shape.num_layers)
        return [key for layer in layers for key in value_keys(session, segment_id, layer, num_values)]


def _num_values(record: RemoteRecord | None) -> dict[bytes, int]:
    """Values per layer of each of a record's segments."""
    return {entry.segment_id: len(entry.value_tokens) for entry in record.segments} if record else {}


def _first_entries(entries: Iterable[SegmentEntry], num_tokens: int) -> tuple[SegmentEntry, ...]:
    """The entries that make up the first `num_tokens` tokens."""
    taken: list[SegmentEntry] = []
    for entry in entries:
        if num_tokens <= 0:
            break
        taken.append(msgspec.structs.replace(entry, length=min(entry.length, num_tokens)))
        num_tokens -= entry.length
    return tuple(taken)


def _values_between(
    session: SessionKey, entries: Iterable[SegmentEntry], layer: int, start: int, stop: int
) -> Iterator[tuple[str, SegmentEntry, int, int, int, int]]:
    """Of each value that tokens [start, stop) of a record need: its key, entry, first token in the segment,
    number of tokens, and the part [low, high) of it that is needed."""
    position = 0
    for entry in entries:
        keys = value_keys(session, entry.segment_id, layer, len(entry.value_tokens))
        first_token = 0
        for key, num_tokens in zip(keys, entry.value_tokens, strict=True):
            begin = position + first_token
            low = max(0, start - begin)
            high = min(num_tokens, entry.length - first_token, stop - begin)
            if low < high:
                yield key, entry, first_token, num_tokens, low, high
            first_token += num_tokens
        position += entry.length


def _value_tokens(layers: Sequence[Sequence[RowChunk]], limit: int) -> tuple[int, ...]:
    """Tokens of each value: values end where any layer's chunk ends, and have at most `limit` tokens."""
    ends = {end for chunks in layers for end in accumulate(chunk.num_tokens for chunk in chunks)}
    counts: list[int] = []
    begin = 0
    for end in sorted(ends):
        full, rest = divmod(end - begin, limit)
        counts += [limit] * full + ([rest] if rest else [])
        begin = end
    return tuple(counts)


def _cut(chunks: Sequence[RowChunk], value_tokens: Sequence[int]) -> Iterator[_Part]:
    position = 0
    for num_tokens in value_tokens:
        (part,) = part_of(chunks, position, position + num_tokens)
        yield position, part
        position += num_tokens
