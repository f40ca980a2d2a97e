"""Sessions' history in Redis: values first, the record last, in one atomic commit that the turn's base
permits.

    write: reserve quota ──► new values ──► commit script (is the fence the base's?) ──► old values removed
                                 │ any failure                       │ no: SessionBusy
                                 └──────── new values removed ◄──────┘
    read:  record ──► a layer's values in one call; one that is missing or damaged is a HistoryMiss

All keys of a session share a hash tag, so that a cluster stores them on one node:

    kvferry:history:1:{<owner>/<session id>}:record              record
    kvferry:history:1:{<owner>/<session id>}:segments            hash: segment id -> values per layer,
                                                                 checkpoint id -> 0
    kvferry:history:1:{<owner>/<session id>}:<segment>:<layer>:<i>   value
    kvferry:history:1:{<owner>/<session id>}:<checkpoint>:<layer>    value
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import chain
from typing import Any

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss, KvferryError, SessionBusy
from kvferry.shared.history.checkpoints import LayerState
from kvferry.shared.history.redis_client import Client, RedisLink
from kvferry.shared.history.redis_quota import KEY_PREFIX, RedisQuota
from kvferry.shared.history.rows import RowChunk
from kvferry.shared.history.storage import VALUE_BYTES, NewRecord
from kvferry.shared.history.stored_format import (
    FENCE_BYTES,
    FENCE_OFFSET,
    CheckpointEntry,
    StoredShape,
    TierRecord,
    read_record,
    read_state,
    read_values,
    wanted_values,
)

_BATCH_BYTES = 8 << 20
# Values outlive their record: a record that exists names values that exist.
_VALUE_GRACE_S = 60.0
_FENCE = (FENCE_OFFSET, FENCE_OFFSET + FENCE_BYTES - 1)

_COMMIT = f"""
local fence = redis.call('GETRANGE', KEYS[1], {_FENCE[0]}, {_FENCE[1]})
if fence ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


class RedisHistory:
    """Implements `Storage`. Every method raises StoreUnavailable as `RedisLink.call` does."""

    name = "redis"

    def __init__(
        self,
        link: RedisLink,
        quota: RedisQuota,
        *,
        shape: StoredShape,
        ttl_s: float,
        value_bytes: int = VALUE_BYTES,
    ) -> None:
        """Use a link's Redis. Args: ttl_s: a session is deleted after this long without a turn."""
        self.shape = shape
        self._link = link
        self._quota = quota
        self._ttl_ms = int(ttl_s * 1000)
        self._value_ttl_ms = int((ttl_s + _VALUE_GRACE_S) * 1000)
        self.value_bytes = value_bytes

    @property
    def size_bytes(self) -> int:
        return self._quota.total_bytes

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._link.close()

    def record(self, session: SessionKey) -> TierRecord | None:
        value = self._link.call(lambda client: client.get(record_key(session)))
        return read_record(self.shape.opened(session, value), session) if value is not None else None

    def load(
        self, session: SessionKey, record: TierRecord, layer: int, start: int, stop: int
    ) -> list[RowChunk]:
        wanted = list(wanted_values(record, start, stop))
        keys = [_value_key(session, want.entry.segment_id, layer, want.index) for want in wanted]
        values = self._link.call(lambda client: client.mget(keys))
        return read_values(session, wanted, values, shape=self.shape, layer=layer)

    def load_states(self, session: SessionKey, entry: CheckpointEntry) -> dict[int, LayerState]:
        return {layer: self._load_state(session, entry.checkpoint_id, layer) for layer in self.shape.states}

    def _load_state(self, session: SessionKey, checkpoint_id: bytes, layer: int) -> LayerState:
        key = _state_key(session, checkpoint_id, layer)
        value = self._link.call(lambda client: client.get(key))
        return read_state(value, session, shape=self.shape, checkpoint_id=checkpoint_id, layer=layer)

    def write(self, session: SessionKey, base: TierRecord | None, new: NewRecord) -> None:
        for victim in self._quota.reserve(session, new.record.size_bytes):
            self.delete(victim)
        try:
            self._extend(session, _num_values(new.record, without=new))
            self._put(session, new)
            self._commit(session, base.fence if base is not None else b"", new.value)
        except KvferryError:
            self._undo(session, new, base)
            raise
        self._collect(session, new.record, base)

    def touch(self, session: SessionKey, record: TierRecord) -> None:
        self._quota.reserve(session, record.size_bytes)
        self._extend(session, _num_values(record))
        self._link.call(lambda client: client.pexpire(record_key(session), self._ttl_ms))

    def delete(self, session: SessionKey) -> None:
        """Remove a session's record, then all its values, including those of unfinished writes."""
        record: TierRecord | None = None
        with contextlib.suppress(HistoryMiss):  # unreadable: the index of segments still names its values
            record = self.record(session)
        self._link.call(lambda client: client.unlink(record_key(session)))
        self._remove(session, self._indexed(session) | _num_values(record))
        self._link.call(lambda client: client.unlink(_segments_key(session)))
        self._quota.release(session)

    def _extend(self, session: SessionKey, named: Mapping[bytes, int]) -> None:
        """Restart the time to live of segments and checkpoints that the new record names as well."""
        keys = [key for part_id, count in named.items() for key in self._keys(session, part_id, count)]

        def expire(pipeline: Client) -> None:
            for key in keys:
                pipeline.pexpire(key, self._value_ttl_ms)

        if keys and not all(self._link.pipeline(expire)):
            raise HistoryMiss(f"Redis has lost values of session {session.session_id!r}", reason="evicted")

    def _put(self, session: SessionKey, new: NewRecord) -> None:
        index, entry = _segments_key(session), new.entry

        def announce(pipeline: Client) -> None:
            for part_id, count in _added(new).items():
                pipeline.hset(index, part_id.hex(), count)
            pipeline.pexpire(index, self._value_ttl_ms)

        self._link.pipeline(announce)
        batch: dict[str, bytes] = {}

        def put(pipeline: Client) -> None:
            for key, value in batch.items():
                pipeline.set(key, value, px=self._value_ttl_ms)

        rows = (
            (_value_key(session, entry.segment_id, layer, number), value)
            for layer, number, value in new.values()
        )
        states = (
            (_state_key(session, checkpoint.checkpoint_id, layer), value)
            for checkpoint, states in new.states
            for layer, value in new.state_values(checkpoint, states)
        )
        for key, value in chain(rows, states):
            batch[key] = value
            if sum(map(len, batch.values())) >= _BATCH_BYTES:
                self._link.pipeline(put)
                batch.clear()
        if batch:
            self._link.pipeline(put)

    def _commit(self, session: SessionKey, fence: bytes, value: bytes) -> None:
        key = record_key(session)
        # A retry of a commit whose answer was lost finds its own record, and counts as done.
        mine = value[FENCE_OFFSET : FENCE_OFFSET + FENCE_BYTES]

        def commit(client: Client) -> Any:
            if client.eval(_COMMIT, 1, key, fence, value, self._ttl_ms):
                return mine
            return client.getrange(key, *_FENCE)

        found = self._link.call(commit)
        if found == b"":
            raise HistoryMiss(
                f"Redis has lost the record of session {session.session_id!r}", reason="evicted"
            )
        if found != mine:
            raise SessionBusy(f"session {session.session_id!r} was changed by another turn", reason="fenced")

    def _undo(self, session: SessionKey, new: NewRecord, base: TierRecord | None) -> None:
        """Clean up after a failed write; what cannot be removed now expires."""
        with contextlib.suppress(KvferryError):
            self._remove(session, _added(new))
            if base is not None:
                self._quota.reserve(session, base.size_bytes)
            else:
                self._quota.release(session)

    def _collect(self, session: SessionKey, record: TierRecord, base: TierRecord | None) -> None:
        """Remove segments that the new record does not name; what cannot be removed now expires."""
        named = _num_values(record)
        with contextlib.suppress(KvferryError):
            stored = self._indexed(session) | _num_values(base)  # the index may have been evicted
            self._remove(session, {key: count for key, count in stored.items() if key not in named})

    def _indexed(self, session: SessionKey) -> dict[bytes, int]:
        """Return what `_num_values` does, from the index, including unfinished writes."""
        index = self._link.call(lambda client: client.hgetall(_segments_key(session)))
        return {bytes.fromhex(name.decode()): int(count) for name, count in index.items()}

    def _remove(self, session: SessionKey, segments: Mapping[bytes, int]) -> None:
        for segment_id, num_values in segments.items():

            def remove(pipeline: Client, segment_id: bytes = segment_id, count: int = num_values) -> None:
                for key in self._keys(session, segment_id, count):  # one each: a cluster's pipeline wants it
                    pipeline.unlink(key)
                pipeline.hdel(_segments_key(session), segment_id.hex())

            self._link.pipeline(remove)

    def _keys(self, session: SessionKey, segment_id: bytes, num_values: int) -> list[str]:
        """Return the keys of a segment's values in all layers; of a checkpoint's if there are 0 for each."""
        if num_values == 0:
            return [_state_key(session, segment_id, layer) for layer in self.shape.states]
        return [
            _value_key(session, segment_id, layer, index)
            for layer in range(self.shape.num_layers)
            for index in range(num_values)
        ]


def record_key(session: SessionKey) -> str:
    return f"{_session_prefix(session)}record"


def _session_prefix(session: SessionKey) -> str:
    return f"{KEY_PREFIX}{{{session.owner}/{session.session_id}}}:"


def _segments_key(session: SessionKey) -> str:
    return f"{_session_prefix(session)}segments"


def _value_key(session: SessionKey, segment_id: bytes, layer: int, index: int) -> str:
    return f"{_session_prefix(session)}{segment_id.hex()}:{layer}:{index}"


def _state_key(session: SessionKey, checkpoint_id: bytes, layer: int) -> str:
    return f"{_session_prefix(session)}{checkpoint_id.hex()}:{layer}"


def _num_values(record: TierRecord | None, *, without: NewRecord | None = None) -> dict[bytes, int]:
    """Count the values per layer of each of a record's segments, with 0 for each of its checkpoints."""
    if record is None:
        return {}
    new = _added(without) if without is not None else {}
    named = {entry.segment_id: len(entry.value_tokens) for entry in record.segments}
    named |= {entry.checkpoint_id: 0 for entry in record.body.checkpoints}
    return {part_id: count for part_id, count in named.items() if part_id not in new}


def _added(new: NewRecord) -> dict[bytes, int]:
    """Count what a write adds, as `_num_values` does."""
    states = {entry.checkpoint_id: 0 for entry, _ in new.states}
    return {new.entry.segment_id: len(new.entry.value_tokens), **states}
