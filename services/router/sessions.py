"""Sessions: what was said, as text and as token ids, and who may speak next.

The record is the conversation; the KV that goes with it lies at a prefill worker and may vanish without
losing it. Kept in this process's memory. Does not call workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvferry.services.router.schemas import SESSION_ID_RULE, is_session_id
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest, SessionBusy, SessionNotFound


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """A session after a turn; replaced as a whole by the next turn's end.

    Attributes:
        kind: which endpoint made it; the other one may only replace it.
        model_fingerprint: the model whose token ids these are.
        messages: the conversation as (role, text); empty for text completions.
        text: prompt and completion of a text completion; empty for chats.
        token_ids: prompt and completion of the last turn: the whole conversation.
        assistant_ends: for every assistant message, how many of `token_ids` come before and in it.
        last_plan: the last turn's `kv` extras.
        prefill_addresses: workers that may hold history of it, the last one used first.
    """

    kind: Literal["chat", "text"]
    model_fingerprint: str
    token_ids: tuple[int, ...]
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""
    assistant_ends: tuple[int, ...] = ()
    turns: int = 0
    last_plan: dict[str, Any] | None = None
    prefill_addresses: tuple[str, ...] = ()
    expires_at_s: float = 0.0


class _Entry:
    """A session's place in the store. Removed from it by DELETE even while a turn holds the lock."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.record: SessionRecord | None = None
        self.users = 0


class SessionLease:
    """The right to run one turn of a session, held from the turn's start to its record's update."""

    def __init__(self, store: SessionStore, key: SessionKey, entry: _Entry) -> None:
        self._store = store
        self._entry = entry
        self.key = key

    @property
    def record(self) -> SessionRecord | None:
        return self._entry.record

    @property
    def is_current(self) -> bool:
        """False once the session was deleted: this turn's end must not bring it back."""
        return self._store._entries.get(self.key) is self._entry

    def commit(self, record: SessionRecord) -> bool:
        """Make the turn part of the session; returns whether the session was still there."""
        if not self.is_current:
            return False
        self._entry.record = replace(record, expires_at_s=self._store.next_expiry_s())
        return True


class SessionStore:
    """All sessions of this router.

        absent ──lease()──► first turn ──commit──► idle ◄──lease/commit──► in a turn
           ▲                    │ abort              │ TTL, eviction, DELETE     │ DELETE
           └────────────────────┴────────────────────┴───────────────────────────┘

    Args:
        ttl_s: idle sessions expire after so long; each turn starts the time anew.
        wait_s: how long a request awaits its session's turn.
        clock: Unix time in seconds.
    """

    def __init__(self, *, ttl_s: float, wait_s: float, max_sessions: int, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._wait_s = wait_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._entries: dict[SessionKey, _Entry] = {}

    def next_expiry_s(self) -> float:
        return self._clock() + self._ttl_s

    @asynccontextmanager
    async def lease(self, key: SessionKey) -> AsyncIterator[SessionLease]:
        """Wait for the session's turn and hold it.

        Raises: SessionBusy after `wait_s`.
        """
        while True:
            entry = self._entries.setdefault(key, _Entry())
            entry.users += 1
            try:
                await self._lock(key, entry)
                try:
                    lease = SessionLease(self, key, entry)
                    if not lease.is_current:
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
            raise SessionBusy(
                f"Session {key.session_id!r} is in another request; waited {self._wait_s:g} s",
                retry_after_s=1.0,
            ) from None

    def get(self, key: SessionKey) -> SessionRecord:
        """Raises: SessionNotFound."""
        entry = self._entries.get(key)
        if entry is None or entry.record is None or self._is_expired(entry):
            raise SessionNotFound(f"There is no session {key.session_id!r}")
        return entry.record

    def owned_by(self, owner: str) -> list[tuple[SessionKey, SessionRecord]]:
        return [
            (key, entry.record)
            for key, entry in self._entries.items()
            if key.owner == owner and entry.record is not None and not self._is_expired(entry)
        ]

    def delete(self, key: SessionKey) -> SessionRecord | None:
        """Forget a session, also while a turn of it runs; returns its record, None before the first turn's
        end.

        Raises: SessionNotFound.
        """
        entry = self._entries.get(key)
        if entry is None or self._is_expired(entry):
            raise SessionNotFound(f"There is no session {key.session_id!r}")
        del self._entries[key]
        return entry.record

    def remove_stale(self) -> list[tuple[SessionKey, SessionRecord]]:
        """Forget idle sessions that expired, and the longest idle ones beyond `max_sessions`."""
        idle = [
            (entry.record.expires_at_s, key)
            for key, entry in self._entries.items()
            if entry.users == 0 and entry.record is not None
        ]
        idle.sort(key=lambda item: item[0])
        now_s, excess = self._clock(), len(self._entries) - self._max_sessions
        stale = [key for rank, (expiry_s, key) in enumerate(idle) if expiry_s <= now_s or rank < excess]
        removed = [(key, self._entries.pop(key)) for key in stale]
        return [(key, entry.record) for key, entry in removed if entry.record is not None]

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
