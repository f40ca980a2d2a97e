"""Sessions in Redis: routers that share it see the same sessions and run each one's turns one at a time.

Records are in Redis and, for sessions that this router has served, copied in its memory. Guarantees:

- Of two turns that started from one record, one commits. DELETE wins over a running turn on any router.
- A turn whose record Redis does not take is answered, and its answer says so. The session's next turn is
  refused (SessionNotStored) until one has the whole conversation: here at once, at the other routers when
  this one has reached Redis again and marked the session there.
- While Redis is down, only turns with the whole conversation run. They are not stored.
- A turn that another router's commit has overtaken ends with an error, unless it was a whole conversation.
- A session that Redis has lost and nobody has a copy of is refused where its record matters.
- A Redis that lost its data gets it back from the copies. Copies of sessions deleted through another router
  are dropped within one round of sweeps, each of which compares 512 copies with Redis; only data lost within
  that time could bring such a session back.

Calls no workers.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import structlog

from kvferry.services.router.sessions.record import KeyUsage, SessionRecord, SessionSummary
from kvferry.services.router.sessions.redis_records import DELETED, RedisRecords, Stored
from kvferry.services.router.sessions.store import SessionLease, SessionStore, is_document, not_found, sized
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import CapacityExceeded, SessionBusy, SessionNotStored, StoreUnavailable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_CLEANING_INTERVAL_S = 60.0
_COMPARED_AT_ONCE = 512
"""Copies in one sweep, so that requests do not wait while thousands are compared."""

_log = structlog.get_logger(__name__)


class _Unstored(NamedTuple):
    """A turn that Redis did not take.

    Attributes:
        token: of its lease; empty where Redis was away from the start.
        commits: those that Redis may have while no other turn has followed: the one before this turn, and
            this one's, because a call that was given up may still arrive. Empty where nothing is known.
    """

    token: str
    commits: tuple[str, ...]


class RedisLease(SessionLease):
    """A lease that Redis granted under `token`; with None Redis was away, and the turn cannot be stored."""

    def __init__(
        self,
        store: RedisSessionStore,
        local: SessionLease,
        token: str | None,
        *,
        needs_record: bool,
        commit_id: str = "",
    ) -> None:
        """Args: commit_id: what Redis has without a record."""
        super().__init__(store, local.key, local._entry)
        self._redis_store = store
        self.token = token
        self.needs_record = needs_record
        self._commit_id = commit_id
        self.tried_commit_id = ""
        """Of the record that this turn's commit has sent."""

    @property
    def commit_id(self) -> str:
        """The commit that the turn continues: the record's, or a deletion's marker."""
        return self.record.commit_id if self.record is not None else self._commit_id

    async def is_current(self) -> bool:
        return self.is_valid and (self.token is None or await self._redis_store.renew(self.key, self.token))

    async def commit(self, record: SessionRecord) -> bool:
        return await self._redis_store.commit(self, record)

    def note_unstored(self) -> None:
        self._redis_store.note_unstored(self)


class RedisSessionStore(SessionStore):
    """Sessions over Redis; the entries of this process are leases within this router, and the copies.

        lease: wait here ──► wait in Redis ──► turn, renewing ──► commit ──► release
                                  └─ Redis away ──► turn          └─ Redis away
                                                     └───────────────┴──► not stored ──► marked in Redis

    Args:
        lease_s: a lease that is not renewed for this long may be taken over.
        on_event: called with "offline", "not_stored" or "restored".
        options: of `SessionStore`.
    """

    def __init__(
        self, records: RedisRecords, *, lease_s: float, on_event: Callable[[str], None], **options: Any
    ) -> None:
        super().__init__(**options)
        self._records = records
        self._lease_s = lease_s
        self._on_event = on_event
        self._instance = secrets.token_hex(8)
        self._unstored: dict[SessionKey, _Unstored] = {}
        """Sessions that lack their last turn, while Redis has no mark of that."""
        self._releases: set[asyncio.Task[None]] = set()
        self._next_cleaning_s = 0.0
        self._next_compared = 0

    @asynccontextmanager
    async def lease(self, key: SessionKey, *, needs_record: bool = True) -> AsyncIterator[RedisLease]:
        """Lease as in memory. Raises: SessionNotStored: the last turn is missing and its record needed."""
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        async with super().lease(key) as local:
            token = f"{self._instance}.{secrets.token_hex(8)}"
            grant = await self._grant(key, token, deadline_s, needs_record=needs_record)
            if grant is None:
                yield RedisLease(self, local, None, needs_record=False)
                return
            renewing = asyncio.create_task(self._keep_renewing(key, token))
            try:
                await self._reconcile(local, token, grant)
                commit_id = grant.commit_id
                lease = RedisLease(self, local, token, needs_record=needs_record, commit_id=commit_id)
                if needs_record:
                    self._check(lease, grant)
                yield lease
            finally:
                renewing.cancel()
                release = asyncio.create_task(self._release(key, token))
                self._releases.add(release)
                release.add_done_callback(self._releases.discard)
                await asyncio.shield(release)

    async def _grant(
        self, key: SessionKey, token: str, deadline_s: float, *, needs_record: bool
    ) -> Stored | None:
        """Lease the session in Redis; None where Redis is down and the turn has the whole conversation."""
        try:
            return await self._acquire(key, token, deadline_s)
        except StoreUnavailable as error:
            if error.reason in ("format", "key"):
                raise
            self._on_event("offline")
            if needs_record and key in self._unstored:
                raise SessionNotStored.of(key.session_id) from error
            if needs_record:
                raise
            _log.warning("a whole conversation runs without Redis", error=error.message)
            return None

    async def _acquire(self, key: SessionKey, token: str, deadline_s: float) -> Stored:
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            grant = await self._records.acquire(key, token, self._lease_s, known=self.peek(key))
            if grant is not None:
                return grant
            remaining_s = deadline_s - loop.time()
            if remaining_s <= 0:
                raise self.busy(key)
            await asyncio.sleep(min(remaining_s, pause_s * random.uniform(0.5, 1.5)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _reconcile(self, local: SessionLease, token: str, grant: Stored) -> None:
        """Bring the copy here up to date with Redis, or a Redis that lost the session with the copy."""
        ours = local.record
        if ours is None or grant.commit_id:
            local.put(grant.record)
        elif not grant.is_marked:
            self._on_event("restored")
            local.put(await self._records.commit(local.key, token, "", ours) or ours)

    def _check(self, lease: RedisLease, grant: Stored) -> None:
        """Check the lease. Raises: SessionNotStored, StoreUnavailable: its record cannot be continued."""
        missing = self._unstored.get(lease.key)
        if missing and missing.commits and lease.commit_id and lease.commit_id not in missing.commits:
            del self._unstored[lease.key]  # the session has gone on at another router
        if grant.is_marked or lease.key in self._unstored:
            raise SessionNotStored.of(lease.key.session_id)
        if grant.lost and lease.record is None:
            raise StoreUnavailable(
                f"Session {lease.key.session_id!r} was lost by its store; send the whole conversation with "
                "session_mode 'replace', or delete the session",
                reason="lost",
            )

    async def commit(self, lease: RedisLease, record: SessionRecord) -> bool:
        """See `SessionLease.commit`. Raises: StoreUnavailable: Redis does not take the record."""
        key = lease.key
        if not lease.is_valid:
            return False
        if lease.token is None:
            raise StoreUnavailable("Redis was away when the turn began", reason="unreachable")
        written = sized(
            replace(
                record,
                expires_at_s=self.next_expiry_s(key, record),
                commit_id=secrets.token_hex(16),
                parts=(),
            )
        )
        lease.tried_commit_id = written.commit_id
        try:
            stored = await self._records.commit(
                key, lease.token, lease.commit_id, written, before=lease.record, max_bytes=self._max_bytes
            )
        except CapacityExceeded:
            usage = await self.usage(key.owner, documents=is_document(key), excluding=key)
            raise self.too_many_bytes(key, usage, written.size_bytes) from None
        lease_is_valid = lease.put(stored)
        if stored is not None:
            self._unstored.pop(key, None)
            return lease_is_valid
        if lease.needs_record and not (await self._records.read(key)).is_deleted:
            raise SessionBusy(f"Session {key.session_id!r} was continued by another router meanwhile")
        return False

    def note_unstored(self, lease: RedisLease) -> None:
        self._on_event("not_stored")
        self._unstored[lease.key] = (
            _Unstored("", ())
            if lease.token is None
            else _Unstored(lease.token, (lease.commit_id, lease.tried_commit_id))
        )

    async def _mark(self) -> None:
        """Note in Redis, for all routers, which sessions lack their last turn."""
        for key, missing in list(self._unstored.items()):
            try:
                await self._records.mark(key, *missing, self.ttl_s(key))
            except StoreUnavailable:
                return
            if self._unstored.get(key) == missing:
                del self._unstored[key]

    async def renew(self, key: SessionKey, token: str) -> bool:
        """Extend a lease; returns whether it is current, as far as this router can know."""
        try:
            return await self._records.renew(key, token, self._lease_s)
        except StoreUnavailable:
            return True

    async def _keep_renewing(self, key: SessionKey, token: str) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if not await self.renew(key, token):
                _log.warning("session taken over or deleted during its turn")
                return

    async def _release(self, key: SessionKey, token: str) -> None:
        # A lease that cannot be released now expires.
        with suppress(StoreUnavailable):
            await self._records.release(key, token)

    async def get(self, key: SessionKey) -> SessionRecord:
        """Return a record as in memory; the copy here if Redis is down or has lost it."""
        copy = self.peek(key)
        try:
            stored = await self._records.read(key, known=copy)
        except StoreUnavailable:
            if copy is None:
                raise
            return copy
        record = stored.record if stored.commit_id else copy
        if record is None or record.expires_at_s <= self._clock():
            raise not_found(key)
        return record

    async def owned_by(self, owner: str, *, documents: bool) -> list[tuple[SessionKey, SessionSummary]]:
        found, now_s = await self._records.summaries(owner, documents=documents), self._clock()
        return [(key, summary) for key, summary in found.items() if summary.expires_at_s > now_s]

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        """Return the usage as in memory; that of the copies here if Redis is down."""
        try:
            return await self._records.usage(owner, documents=documents, excluding=excluding)
        except StoreUnavailable:
            return await super().usage(owner, documents=documents, excluding=excluding)

    async def delete(self, key: SessionKey) -> None:
        """Delete as in memory; delete nothing if Redis is down, since the session would come back."""
        marker = f"{DELETED}{secrets.token_hex(16)}"
        deleted = await self._records.delete(key, marker, self.ttl_s(key))
        was_unstored = self._unstored.pop(key, None) is not None
        entry = self._entries.pop(key, None)
        if not (deleted or was_unstored or (entry is not None and entry.users)):
            raise not_found(key)

    async def remove_stale(self) -> dict[SessionKey, SessionRecord]:
        """Mark sessions, drop outdated copies, and now and then remove what has expired in Redis."""
        await self._mark()
        with suppress(StoreUnavailable):
            await self._records.register()
        await self._clean()
        stale = self._stale().keys()
        copies = self._to_compare(stale)
        now_s = self._clock()
        expired = {key: copy for key, copy in copies if key in stale and copy.expires_at_s <= now_s}
        try:
            commits = await self._records.commit_ids([key for key, _ in copies])
        except StoreUnavailable:
            return {}
        there = {key for (key, _), commit in zip(copies, commits, strict=True) if commit}
        for (key, record), commit in zip(copies, commits, strict=True):
            if key in stale or (commit and commit != record.commit_id):
                self._forget_idle(key, record)
        return {key: record for key, record in expired.items() if key not in there}

    def _to_compare(self, stale: Set[SessionKey]) -> list[tuple[SessionKey, SessionRecord]]:
        """Return idle copies: all stale ones, and of the others those whose turn it is."""
        idle = self._idle()
        others = [key for key in idle if key not in stale]
        first = self._next_compared if self._next_compared < len(others) else 0
        self._next_compared = first + _COMPARED_AT_ONCE
        in_turn = [*others[first:], *others[:first]][:_COMPARED_AT_ONCE]
        return [(key, idle[key]) for key in (*stale, *in_turn)]

    async def _clean(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_cleaning_s:
            return
        is_first, self._next_cleaning_s = self._next_cleaning_s == 0.0, now_s + _CLEANING_INTERVAL_S
        with suppress(StoreUnavailable):
            await self._records.remove_expired()
            if is_first and await self._records.evicts_records():
                _log.warning(
                    "Redis evicts sessions when it is full; set its maxmemory-policy to volatile-lru"
                )

    async def close(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases)
        await self._mark()
        await self._records.close()

    def _forget_idle(self, key: SessionKey, record: SessionRecord) -> None:
        """Drop this record, unless a turn has started since."""
        entry = self._entries.get(key)
        if entry is not None and entry.users == 0 and entry.record is record:
            del self._entries[key]
