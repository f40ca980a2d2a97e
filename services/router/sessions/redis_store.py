"""Sessions in Redis: routers that share it see the same sessions and run each one's turns one at a time.

Records are in Redis and, for sessions that this router has served, copied in its memory. Guarantees:

- Of two turns that started from one record, one commits. DELETE wins over a running turn on any router.
- While Redis is down, a session with a copy here continues; its turns are written back when Redis returns. If
  another router has committed since, that commit stands, and the turns made here are dropped and counted. A
  session without a copy here is refused where its record matters.
- A Redis that lost its data gets it back from the copies. Copies of sessions deleted through another router
  are dropped within one sweep; only data lost within that time could bring such a session back.

Does not call workers.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import structlog

from kvferry.services.router.sessions.record import KeyUsage, SessionRecord, SessionSummary, is_document
from kvferry.services.router.sessions.redis_records import RedisRecords, Stored
from kvferry.services.router.sessions.store import MemoryLease, MemorySessionStore, busy, not_found
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import StoreUnavailable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25

_log = structlog.get_logger(__name__)


class RedisLease:
    """As `MemoryLease`. A lease that Redis did not grant is valid in this router alone."""

    def __init__(self, store: RedisSessionStore, local: MemoryLease, token: str, granted: bool) -> None:
        self._store = store
        self._local = local
        self.token = token
        self.granted = granted

    @property
    def key(self) -> SessionKey:
        return self._local.key

    @property
    def record(self) -> SessionRecord | None:
        return self._local.record

    async def is_current(self) -> bool:
        return self._local.is_valid and (not self.granted or await self._store.renew(self.key, self.token))

    async def commit(self, record: SessionRecord) -> bool:
        return await self._store.commit(self._local, record, self.token if self.granted else None)


class RedisSessionStore:
    """The methods of `MemorySessionStore`, over Redis.

        lease: wait here ──► wait in Redis ──► turn, renewing ──► commit ──► release
                                  └─ Redis away: the copy here ──► commit here ──► pending ──► written back

    Args:
        local: leases within this router, and the copies.
        lease_s: a lease that is not renewed for this long may be taken over.
        wait_s: how long a request waits for its busy session.
        on_event: called with "offline", "written_back", "restored" or "conflict".
    """

    def __init__(
        self,
        records: RedisRecords,
        local: MemorySessionStore,
        *,
        lease_s: float,
        wait_s: float,
        clock: Callable[[], float],
        on_event: Callable[[str], None],
    ) -> None:
        self._records = records
        self._local = local
        self._lease_s = lease_s
        self._wait_s = wait_s
        self._clock = clock
        self._on_event = on_event
        self._instance = secrets.token_hex(8)
        self._pending: dict[SessionKey, str] = {}
        """Sessions with turns that are not in Redis yet, and the commit there that they build on."""
        self._releases: set[asyncio.Task[None]] = set()

    # ---- leases ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, key: SessionKey, *, needs_record: bool = True) -> AsyncIterator[RedisLease]:
        """See `MemorySessionStore.lease`."""
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        async with self._local.lease(key) as local:
            token = f"{self._instance}.{secrets.token_hex(8)}"
            grant = await self._grant(local, token, deadline_s, needs_record)
            if grant is None:
                yield RedisLease(self, local, token, granted=False)
                return
            await self._reconcile(local, token, grant)
            renewing = asyncio.create_task(self._keep_renewing(key, token))
            try:
                yield RedisLease(self, local, token, granted=True)
            finally:
                renewing.cancel()
                release = asyncio.create_task(self._release(key, token))
                self._releases.add(release)
                release.add_done_callback(self._releases.discard)
                await asyncio.shield(release)

    async def _grant(
        self, local: MemoryLease, token: str, deadline_s: float, needs_record: bool
    ) -> Stored | None:
        """Lease the session in Redis; None where Redis is down and the turn can run without it."""
        try:
            return await self._acquire(local.key, token, deadline_s)
        except StoreUnavailable as error:
            if error.reason == "format" or (needs_record and local.record is None):
                raise
            self._on_event("offline")
            _log.warning("session continues without Redis", error=error.message)
            return None

    async def _acquire(self, key: SessionKey, token: str, deadline_s: float) -> Stored:
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            grant = await self._records.acquire(key, token, self._lease_s)
            if grant is not None:
                return grant
            remaining_s = deadline_s - loop.time()
            if remaining_s <= 0:
                raise busy(key, self._wait_s)
            await asyncio.sleep(min(remaining_s, pause_s * random.uniform(0.5, 1.5)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _reconcile(self, local: MemoryLease, token: str, grant: Stored) -> None:
        """Bring the copy here up to date with Redis, or Redis with the copy."""
        key, ours = local.key, local.record
        base = self._pending.get(key)
        lost = not grant.commit_id
        if ours is not None and (lost or (base is not None and grant.commit_id == base)):
            self._on_event("restored" if lost else "written_back")
            self._pending.setdefault(key, ours.commit_id)
            with suppress(StoreUnavailable):
                await self._records.commit(key, token, ours)
                self._pending.pop(key, None)
            return
        if base is not None and (ours is None or grant.commit_id != ours.commit_id):
            self._conflict(key)
        self._pending.pop(key, None)
        local.put(grant.record)

    async def commit(self, local: MemoryLease, record: SessionRecord, token: str | None) -> bool:
        """Commit of a lease; `token` is None where Redis did not grant it."""
        key = local.key
        before = local.record
        written = replace(
            record, expires_at_s=self._local.next_expiry_s(key), commit_id=secrets.token_hex(16)
        )
        if not local.is_valid:
            return False
        base = before.commit_id if before is not None else ""
        if token is not None:
            try:
                if not await self._records.commit(key, token, written):
                    local.put(None)
                    self._pending.pop(key, None)
                    return False
            except StoreUnavailable as error:
                _log.warning("session stays in memory until Redis is back", error=error.message)
            else:
                self._pending.pop(key, None)
                return local.put(written)
        if not local.put(written):
            return False
        self._pending.setdefault(key, base)
        return True

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

    # ---- records -----------------------------------------------------------------------------------------

    async def get(self, key: SessionKey) -> SessionRecord:
        """See `MemorySessionStore.get`; the copy here where Redis is down or has lost it."""
        copy = self._local.peek(key)
        try:
            stored = await self._records.read(key)
        except StoreUnavailable:
            if copy is None:
                raise
            return copy
        record = stored.record
        if copy is not None and (not stored.commit_id or key in self._pending):
            record = copy
        if record is None or record.expires_at_s <= self._clock():
            raise not_found(key)
        return record

    async def owned_by(self, owner: str, *, documents: bool) -> list[tuple[SessionKey, SessionSummary]]:
        """See `MemorySessionStore.owned_by`."""
        found = await self._records.summaries(owner, documents=documents)
        for key in self._pending:
            copy = self._local.peek(key)
            if key.owner == owner and is_document(key) == documents and copy is not None:
                found[key] = copy.summary
        now_s = self._clock()
        return [(key, summary) for key, summary in found.items() if summary.expires_at_s > now_s]

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        """See `MemorySessionStore.usage`; of the copies here where Redis is down."""
        try:
            return await self._records.usage(owner, documents=documents, excluding=excluding)
        except StoreUnavailable:
            return await self._local.usage(owner, documents=documents, excluding=excluding)

    async def delete(self, key: SessionKey) -> None:
        """See `MemorySessionStore.delete`. Deletes nothing where Redis is down, since the session would come
        back."""
        marker = f"deleted-{secrets.token_hex(16)}"
        deleted = await self._records.delete(key, marker, self._local.ttl_s(key))
        deleted = deleted or self._pending.pop(key, None) is not None or self._local.is_used(key)
        self._pending.pop(key, None)
        self._local.forget(key)
        if not deleted:
            raise not_found(key)

    async def remove_stale(self) -> list[SessionKey]:
        """See `MemorySessionStore.remove_stale`. Redis expires records by itself; this writes turns back and
        drops outdated copies."""
        await self._write_back()
        stale = [key for key in self._local.stale() if key not in self._pending]
        copies = [(key, record) for key, record in self._local.idle_records() if key not in self._pending]
        now_s = self._clock()
        expired = [key for key, record in copies if key in stale and record.expires_at_s <= now_s]
        try:
            commits = await self._records.commit_ids([key for key, _ in copies])
        except StoreUnavailable:
            return []
        there = {key for (key, _), commit in zip(copies, commits, strict=True) if commit}
        for (key, record), commit in zip(copies, commits, strict=True):
            if key in stale or (commit and commit != record.commit_id):
                self._local.forget_idle(key, record)
        return [key for key in expired if key not in there]

    async def close(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases)
        await self._write_back()
        await self._records.close()

    async def _write_back(self) -> None:
        """Write the turns that Redis has missed, of sessions that no request has or waits for."""
        idle = dict(self._local.idle_records())
        for key, base in list(self._pending.items()):
            record = idle.get(key)
            if record is None:
                if self._local.peek(key) is None and not self._local.is_used(key):
                    self._pending.pop(key, None)
                continue
            try:
                outcome = await self._records.write_back(key, base, self._instance, record)
            except StoreUnavailable:
                return
            if outcome == "written":
                self._on_event("written_back")
                if self._local.peek(key) is record:
                    self._pending.pop(key, None)
            elif outcome == "conflict":
                self._conflict(key)
                self._pending.pop(key, None)
                self._local.forget_idle(key, record)

    def _conflict(self, key: SessionKey) -> None:
        self._on_event("conflict")
        _log.warning("turns made while Redis was down are dropped: another router has committed since")


SessionStore = MemorySessionStore | RedisSessionStore
SessionLease = MemoryLease | RedisLease
