"""Sessions in this process's memory: one turn of a session at a time, and the records that turns leave.

The record is the conversation. Its KV is at a prefill worker and may be lost without losing the session.
`redis_store.py` shares sessions between routers. Documents are stored like sessions, under ids that no
session can have. Does not call workers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from kvferry.services.router.config import RouterConfig
from kvferry.services.router.sessions.record import KeyUsage, SessionRecord, SessionSummary
from kvferry.services.router.sessions.stored_record import MAX_RECORD_BYTES
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import (
    CapacityExceeded,
    DocumentNotFound,
    InvalidRequest,
    KvferryError,
    SessionBusy,
    SessionNotFound,
)

DOCUMENT_PREFIX = "document/"


def is_document(key: SessionKey) -> bool:
    return key.session_id.startswith(DOCUMENT_PREFIX)


def document_key(owner: str, document_id: str) -> SessionKey:
    return SessionKey(owner=owner, session_id=DOCUMENT_PREFIX + document_id)


class _Entry:
    """A session's place in the store. DELETE removes it from the store even while a turn has the lock."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.record: SessionRecord | None = None
        self.users = 0


class SessionLease:
    """The right to run one turn of a session, from the turn's start until its record is updated."""

    def __init__(self, store: SessionStore, key: SessionKey, entry: _Entry) -> None:
        self._store = store
        self._entry = entry
        self.key = key

    @property
    def record(self) -> SessionRecord | None:
        """The session before this turn; None before the end of its first turn."""
        return self._entry.record

    @property
    def is_valid(self) -> bool:
        """True if the store still has the session that was leased."""
        return self._store._entries.get(self.key) is self._entry

    async def is_current(self) -> bool:
        """Return False once the session was deleted or taken over: this turn must not bring it back."""
        return self.is_valid

    async def commit(self, record: SessionRecord) -> bool:
        """Make the turn part of the session; returns whether the lease was still current.

        Raises:
            InvalidRequest, CapacityExceeded: nothing is stored, see `SessionStore.check_quota`.
            StoreUnavailable: Redis does not take the record.
        """
        store = self._store
        record = sized(replace(record, expires_at_s=store.next_expiry_s(self.key, record)))
        if store._max_bytes:
            usage = await store.usage(self.key.owner, documents=is_document(self.key), excluding=self.key)
            store.check_bytes(self, usage, record.size_bytes)
        return self.put(record)

    def note_unstored(self) -> None:
        """Note that the turn is answered although its commit has failed: the next one must have the whole
        conversation. Memory takes every record."""

    def put(self, record: SessionRecord | None) -> bool:
        """Replace the record as it is, expiry included; None removes it."""
        if not self.is_valid:
            return False
        self._entry.record = record
        return True


class SessionStore:
    """All sessions of this router. Sessions of one key are invisible to every other key.

        absent ──lease()──► first turn ──commit──► idle ◄──lease/commit──► in a turn
           ▲                    │ abort              │ TTL, eviction, DELETE     │ DELETE
           └────────────────────┴────────────────────┴───────────────────────────┘

    Args:
        ttl_s: idle time after which a session expires; each turn restarts it.
        document_ttl_s: likewise for documents.
        wait_s: how long a request waits for its busy session.
        max_bytes_per_key: of one key's sessions together, and of its documents; 0: no limit.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        wait_s: float,
        max_sessions: int,
        clock: Callable[[], float],
        document_ttl_s: float = 86_400.0,
        max_bytes_per_key: int = 0,
    ) -> None:
        self._ttl_s = ttl_s
        self._document_ttl_s = document_ttl_s
        self._wait_s = wait_s
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes_per_key
        self._clock = clock
        self._entries: dict[SessionKey, _Entry] = {}

    def ttl_s(self, key: SessionKey) -> float:
        return self._document_ttl_s if is_document(key) else self._ttl_s

    def next_expiry_s(self, key: SessionKey, record: SessionRecord) -> float:
        return self._clock() + (record.ttl_s or self.ttl_s(key))

    @asynccontextmanager
    async def lease(self, key: SessionKey, *, needs_record: bool = True) -> AsyncIterator[SessionLease]:
        """Wait until the session is free, and lease it.

        Args: needs_record: whether a turn without the record would be wrong.
        Raises:
            SessionBusy: another request has had it for too long.
            StoreUnavailable: the record is needed and cannot be read.
        """
        while True:
            entry = self._entries.setdefault(key, _Entry())
            entry.users += 1
            try:
                await self._lock(key, entry)
                try:
                    lease = SessionLease(self, key, entry)
                    if not lease.is_valid:
                        continue  # deleted while we waited: start again with the session's new entry
                    if entry.record is not None and entry.record.expires_at_s <= self._clock():
                        entry.record = None
                    yield lease
                    return
                finally:
                    entry.lock.release()
            finally:
                entry.users -= 1
                if entry.users == 0 and entry.record is None and self._entries.get(key) is entry:
                    del self._entries[key]

    async def _lock(self, key: SessionKey, entry: _Entry) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await entry.lock.acquire()
        except TimeoutError:
            raise self.busy(key) from None

    async def get(self, key: SessionKey) -> SessionRecord:
        """Return a session's record. Raises: SessionNotFound, DocumentNotFound, StoreUnavailable."""
        record = self.peek(key)
        if record is None:
            raise not_found(key)
        return record

    def peek(self, key: SessionKey) -> SessionRecord | None:
        """Return the record in this process; None if there is none or it has expired."""
        entry = self._entries.get(key)
        return None if entry is None or self._is_expired(entry) else entry.record

    def is_running(self, key: SessionKey) -> bool:
        """Return whether a turn of this router has the session: until its KV is in the history."""
        entry = self._entries.get(key)
        return entry is not None and entry.lock.locked()

    async def owned_by(self, owner: str, *, documents: bool) -> list[tuple[SessionKey, SessionSummary]]:
        """List the owner's sessions, or its documents. Raises: StoreUnavailable."""
        return [(key, record.summary) for key, record in self._owned(owner, documents)]

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        """Count what the owner has stored, apart from one of them. Raises: StoreUnavailable."""
        num_records = num_tokens = size_bytes = 0
        first_s = math.inf
        for key, record in self._owned(owner, documents):
            if key != excluding:
                num_records += 1
                num_tokens += len(record.token_ids)
                size_bytes += record.size_bytes
                first_s = min(first_s, record.expires_at_s)
        return KeyUsage(
            num_records=num_records,
            num_tokens=num_tokens,
            size_bytes=size_bytes,
            first_expires_in_s=first_s - self._clock() if num_records else 0.0,
        )

    async def check_quota(self, lease: SessionLease, config: RouterConfig, record: SessionRecord) -> None:
        """Check that the lease's owner may store this as its session or document.

        Checked before a turn runs, so that nothing is computed that cannot be stored. Routers that share a
        Redis count together. Two simultaneous requests may both pass, except for bytes, which the commit
        checks again.

        Args: record: as it will be after the turn, as far as that is known.
        Raises:
            InvalidRequest: it is too long by itself.
            CapacityExceeded: with the owner's others it is too much; deleting some of them helps.
        """
        key, is_new, documents = lease.key, lease.record is None, is_document(lease.key)
        what = "documents" if documents else "sessions"
        limit = config.max_documents_per_key if documents else config.max_sessions_per_key
        max_tokens, num_tokens = config.max_history_tokens_per_key, len(record.token_ids)
        size_bytes = sized(record).size_bytes
        if max_tokens and num_tokens > max_tokens:
            raise InvalidRequest(
                f"This would be {num_tokens} tokens; all {what} of a key may have {max_tokens} together"
            )
        if not is_new and not max_tokens and not self._max_bytes:
            return
        usage = await self.usage(key.owner, documents=documents, excluding=key)
        if is_new and usage.num_records >= limit:
            raise CapacityExceeded(
                f"This key has {usage.num_records} {what}; the limit is {limit}, delete some",
                reason=f"{what}_quota",
                retry_after_s=usage.first_expires_in_s,
            )
        if max_tokens and usage.num_tokens + num_tokens > max_tokens:
            raise CapacityExceeded(
                f"This key's other {what} have {usage.num_tokens} tokens and this one would have "
                f"{num_tokens}; the limit for all is {max_tokens}, delete some",
                reason=f"{what}_tokens_quota",
                retry_after_s=usage.first_expires_in_s,
            )
        self.check_bytes(lease, usage, size_bytes)

    def check_bytes(self, lease: SessionLease, usage: KeyUsage, size_bytes: int) -> None:
        """Check that the lease's session or document may have this many bytes beside the owner's others. One
        that does not grow may.

        Raises: as `check_quota`.
        """
        held = lease.record.size_bytes if lease.record is not None else 0
        if self._max_bytes and size_bytes > held and usage.size_bytes + size_bytes > self._max_bytes:
            raise self.too_many_bytes(lease.key, usage, size_bytes)

    def too_many_bytes(self, key: SessionKey, usage: KeyUsage, size_bytes: int) -> KvferryError:
        what = "documents" if is_document(key) else "sessions"
        if size_bytes > self._max_bytes:
            return InvalidRequest(
                f"This would be stored with {size_bytes} bytes; all {what} of a key may have "
                f"{self._max_bytes} together",
                reason="record_too_long",
            )
        return CapacityExceeded(
            f"This key's other {what} are stored with {usage.size_bytes} bytes and this one would be with "
            f"{size_bytes}; the limit for all is {self._max_bytes}, delete some",
            reason=f"{what}_bytes_quota",
            retry_after_s=usage.first_expires_in_s,
        )

    async def delete(self, key: SessionKey) -> None:
        """Delete a session, even during a turn. Raises as `get` does."""
        entry = self._entries.get(key)
        if entry is None or self._is_expired(entry):
            raise not_found(key)
        del self._entries[key]

    async def remove_stale(self) -> dict[SessionKey, SessionRecord]:
        """Remove expired sessions, and the longest idle ones above `max_sessions`; returns those whose
        history can be dropped."""
        stale = self._stale()
        for key in stale:
            del self._entries[key]
        return stale

    async def close(self) -> None:
        """Close nothing, because nothing is open."""

    def busy(self, key: SessionKey) -> SessionBusy:
        return SessionBusy(
            f"Session {key.session_id!r} is in another request; waited {self._wait_s:g} s", retry_after_s=1.0
        )

    def _stale(self) -> dict[SessionKey, SessionRecord]:
        """Return the idle sessions that `remove_stale` would remove."""
        idle = sorted(self._idle().items(), key=lambda item: item[1].expires_at_s)
        now_s, excess = self._clock(), len(self._entries) - self._max_sessions
        return {
            key: record
            for rank, (key, record) in enumerate(idle)
            if record.expires_at_s <= now_s or rank < excess
        }

    def _idle(self) -> dict[SessionKey, SessionRecord]:
        return {
            key: entry.record
            for key, entry in self._entries.items()
            if entry.users == 0 and entry.record is not None
        }

    def _owned(self, owner: str, documents: bool) -> list[tuple[SessionKey, SessionRecord]]:
        now_s = self._clock()
        return [
            (key, entry.record)
            for key, entry in self._entries.items()
            if key.owner == owner
            and is_document(key) == documents
            and entry.record is not None
            and (entry.users or entry.record.expires_at_s > now_s)
        ]

    def _is_expired(self, entry: _Entry) -> bool:
        return entry.users == 0 and entry.record is not None and entry.record.expires_at_s <= self._clock()


def sized(record: SessionRecord) -> SessionRecord:
    """Return the record with its `size_bytes`. Raises: InvalidRequest where it is too long to be stored."""
    size_bytes = len(msgspec.msgpack.encode(record))
    if size_bytes > MAX_RECORD_BYTES:
        raise InvalidRequest(
            f"This would be stored with {size_bytes} bytes; one conversation or document may have "
            f"{MAX_RECORD_BYTES}",
            reason="record_too_long",
        )
    return replace(record, size_bytes=size_bytes)


def not_found(key: SessionKey) -> KvferryError:
    if is_document(key):
        return DocumentNotFound(f"There is no document {key.session_id.removeprefix(DOCUMENT_PREFIX)!r}")
    return SessionNotFound(f"There is no session {key.session_id!r}")
