"""Sessions: whose turn it is, and the records that turns leave. The protocol, and the store in this process.

The record is the conversation; the KV that goes with it lies at a prefill worker and may vanish without
losing it. Does not call workers. `redis_sessions.py` shares sessions between routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from kvferry.services.router.schemas import SESSION_ID_RULE, is_session_id
from kvferry.services.router.session_record import KeyUsage, SessionRecord, SessionSummary, is_document
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest, SessionBusy, SessionNotFound


class SessionLease(Protocol):
    """The right to run one turn of a session, held from the turn's start to its record's update."""

    @property
    def key(self) -> SessionKey: ...

    @property
    def record(self) -> SessionRecord | None:
        """The session as the turn finds it; None before its first turn's end."""
        ...

    async def is_current(self) -> bool:
        """False once the session was deleted or taken over: this turn's end must not bring it back."""
        ...

    async def commit(self, record: SessionRecord) -> bool:
        """Make the turn part of the session; returns whether the session was still this lease's."""
        ...


class SessionStore(Protocol):
    """All sessions that a router can see. Sessions of one key are invisible to every other.

    absent ──lease()──► first turn ──commit──► idle ◄──lease/commit──► in a turn
       ▲                    │ abort              │ TTL, eviction, DELETE     │ DELETE
       └────────────────────┴────────────────────┴───────────────────────────┘
    """

    def lease(
        self, key: SessionKey, *, needs_record: bool = True
    ) -> AbstractAsyncContextManager[SessionLease]:
        """Wait for the session's turn and hold it.

        Args: needs_record: whether a turn that does not know what the record says would go wrong.
        Raises:
            SessionBusy: another request has it for too long.
            StoreUnavailable: the record is needed and cannot be read.
        """
        ...

    async def get(self, key: SessionKey) -> SessionRecord:
        """Raises: SessionNotFound, StoreUnavailable."""
        ...

    async def owned_by(self, owner: str, *, documents: bool) -> list[tuple[SessionKey, SessionSummary]]:
        """The owner's sessions, or its documents. Raises: StoreUnavailable."""
        ...

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        """What the owner keeps, without one of them. Raises: StoreUnavailable."""
        ...

    async def delete(self, key: SessionKey) -> None:
        """Forget a session, also while a turn of it runs.

        Raises: SessionNotFound, StoreUnavailable.
        """
        ...

    async def remove_stale(self) -> list[SessionKey]:
        """Forget idle sessions that expired, and the longest idle ones beyond what is kept; returns those
        whose history nobody needs any more."""
        ...

    async def close(self) -> None: ...


class _Entry:
    """A session's place in the store. Removed from it by DELETE even while a turn holds the lock."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.record: SessionRecord | None = None
        self.users = 0


class MemoryLease:
    """Implements `SessionLease` within one process."""

    def __init__(self, store: MemorySessionStore, key: SessionKey, entry: _Entry) -> None:
        self._store = store
        self._entry = entry
        self.key = key

    @property
    def record(self) -> SessionRecord | None:
        return self._entry.record

    @property
    def holds(self) -> bool:
        """Whether the session is still the one that was leased."""
        return self._store._entries.get(self.key) is self._entry

    async def is_current(self) -> bool:
        return self.holds

    async def commit(self, record: SessionRecord) -> bool:
        return self.keep(replace(record, expires_at_s=self._store.next_expiry_s(self.key)))

    def keep(self, record: SessionRecord | None) -> bool:
        """`commit` as it is, expiry included; None keeps nothing."""
        if not self.holds:
            return False
        self._entry.record = record
        return True


class MemorySessionStore:
    """Implements `SessionStore` in this process's memory.

    Args:
        ttl_s: idle sessions expire after so long; each turn starts the time anew.
        document_ttl_s: likewise for documents.
        wait_s: how long a request awaits its session's turn.
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
    ) -> None:
        self._ttl_s = ttl_s
        self._document_ttl_s = document_ttl_s
        self._wait_s = wait_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._entries: dict[SessionKey, _Entry] = {}

    def ttl_s(self, key: SessionKey) -> float:
        return self._document_ttl_s if is_document(key) else self._ttl_s

    def next_expiry_s(self, key: SessionKey) -> float:
        return self._clock() + self.ttl_s(key)

    @asynccontextmanager
    async def lease(self, key: SessionKey, *, needs_record: bool = True) -> AsyncIterator[MemoryLease]:
        """See `SessionStore.lease`."""
        while True:
            entry = self._entries.setdefault(key, _Entry())
            entry.users += 1
            try:
                await self._lock(key, entry)
                try:
                    lease = MemoryLease(self, key, entry)
                    if not lease.holds:
                        continue  # deleted while we waited: begin again with the session's new entry
                    self._expire(entry)
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
            raise busy(key, self._wait_s) from None

    async def get(self, key: SessionKey) -> SessionRecord:
        record = self.peek(key)
        if record is None:
            raise not_found(key)
        return record

    def peek(self, key: SessionKey) -> SessionRecord | None:
        """The record, None where there is none or it has expired."""
        entry = self._entries.get(key)
        return None if entry is None or self._is_expired(entry) else entry.record

    async def owned_by(self, owner: str, *, documents: bool) -> list[tuple[SessionKey, SessionSummary]]:
        return [
            (key, entry.record.summary)
            for key, entry in self._entries.items()
            if key.owner == owner
            and is_document(key) == documents
            and entry.record is not None
            and not self._is_expired(entry)
        ]

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        found = [
            summary.num_tokens
            for key, summary in await self.owned_by(owner, documents=documents)
            if key != excluding
        ]
        return KeyUsage(num_records=len(found), num_tokens=sum(found))

    async def delete(self, key: SessionKey) -> None:
        """See `SessionStore.delete`."""
        entry = self._entries.get(key)
        if entry is None or self._is_expired(entry):
            raise not_found(key)
        del self._entries[key]

    def forget(self, key: SessionKey) -> None:
        """`delete` of what need not be there."""
        self._entries.pop(key, None)

    def forget_idle(self, key: SessionKey, record: SessionRecord) -> None:
        """Drop this record, unless a turn has come meanwhile."""
        entry = self._entries.get(key)
        if entry is not None and entry.users == 0 and entry.record is record:
            del self._entries[key]

    def is_used(self, key: SessionKey) -> bool:
        """Whether a request has the session or waits for it."""
        entry = self._entries.get(key)
        return entry is not None and entry.users > 0

    async def remove_stale(self) -> list[SessionKey]:
        """See `SessionStore.remove_stale`."""
        stale = self.stale()
        for key in stale:
            del self._entries[key]
        return stale

    def stale(self) -> list[SessionKey]:
        """Idle sessions that are to be forgotten."""
        idle = [
            (entry.record.expires_at_s, key)
            for key, entry in self._entries.items()
            if entry.users == 0 and entry.record is not None
        ]
        idle.sort(key=lambda item: item[0])
        now_s, excess = self._clock(), len(self._entries) - self._max_sessions
        return [key for rank, (expiry_s, key) in enumerate(idle) if expiry_s <= now_s or rank < excess]

    def idle_records(self) -> list[tuple[SessionKey, SessionRecord]]:
        """Records of sessions that nobody uses at the moment."""
        return [
            (key, entry.record)
            for key, entry in self._entries.items()
            if entry.users == 0 and entry.record is not None
        ]

    async def close(self) -> None:
        """Nothing is open."""

    def _is_expired(self, entry: _Entry) -> bool:
        return entry.users == 0 and entry.record is not None and entry.record.expires_at_s <= self._clock()

    def _expire(self, entry: _Entry) -> None:
        if entry.record is not None and entry.record.expires_at_s <= self._clock():
            entry.record = None


def session_key(owner: str, session_id: str, *, param: str) -> SessionKey:
    """The key of a session.

    Raises: InvalidRequest where the id is not well-formed.
    """
    if not is_session_id(session_id):
        raise InvalidRequest(f"{param} is {session_id[:140]!r}; it must be {SESSION_ID_RULE}", param=param)
    return SessionKey(owner=owner, session_id=session_id)


def not_found(key: SessionKey) -> SessionNotFound:
    return SessionNotFound(f"There is no session {key.session_id!r}")


def busy(key: SessionKey, wait_s: float) -> SessionBusy:
    return SessionBusy(
        f"Session {key.session_id!r} is in another request; waited {wait_s:g} s", retry_after_s=1.0
    )
