"""Sessions in Redis: routers that share it see the same sessions and run each one's turns one at a time.

Records are in Redis and, for sessions that this router has served, copied in its memory. Guarantees:

- Of two turns that started from one record, one commits. DELETE wins over a running turn on any router.
- While Redis is down, a session with a copy here continues; its turns are written back when Redis returns. If
  another router has committed since, that commit stands, and the turns made here are dropped and counted. A
  session without a copy here is refused where its record matters.
- A session that Redis has lost and nobody has a copy of is refused where its record matters.
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
from typing import Any

import structlog

from kvferry.services.router.sessions.record import KeyUsage, SessionRecord, SessionSummary
from kvferry.services.router.sessions.redis_records import RedisRecords, Stored
from kvferry.services.router.sessions.store import SessionLease, SessionStore, is_document, not_found
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import StoreUnavailable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_CLEANING_INTERVAL_S = 60.0

_log = structlog.get_logger(__name__)


class RedisLease(SessionLease):
    """A lease that Redis granted under `token`; with None it is valid in this router alone."""

    def __init__(self, store: RedisSessionStore, local: SessionLease, token: str | None) -> None:
        super().__init__(store, local.key, local._entry)
        self._redis_store = store
        self.token = token

    async def is_current(self) -> bool:
        return self.is_valid and (self.token is None or await self._redis_store.renew(self.key, self.token))

    async def commit(self, record: SessionRecord) -> bool:
        return await self._redis_store.commit(self, record)


class RedisSessionStore(SessionStore):
    """Sessions over Redis; the entries of this process are leases within this router, and the copies.

        lease: wait here ──► wait in Redis ──► turn, renewing ──► commit ──► release
                                  └─ Redis away: the copy here ──► commit here ──► pending ──► written back

    Args:
        lease_s: a lease that is not renewed for this long may be taken over.
        on_event: called with "offline", "written_back", "restored" or "conflict".
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
        self._pending: dict[SessionKey, str] = {}
        """Sessions with turns that are not in Redis yet, and the commit there that they build on."""
        self._releases: set[asyncio.Task[None]] = set()
        self._next_cleaning_s = 0.0

    # ---- leases ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, key: SessionKey, *, needs_record: bool = True) -> AsyncIterator[RedisLease]:
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        async with super().lease(key) as local:
            token = f"{self._instance}.{secrets.token_hex(8)}"
            grant = await self._grant(local, token, deadline_s, needs_record)
            if grant is None:
                yield RedisLease(self, local, None)
                return
            renewing = asyncio.create_task(self._keep_renewing(key, token))
            try:
                await self._reconcile(local, token, grant)
                if grant.lost and needs_record and local.record is None:
                    raise StoreUnavailable(
                        f"Session {key.session_id!r} was lost by its store; send the whole conversation with "
                        "session_mode 'replace', or delete the session",
                        reason="lost",
                    )
                yield RedisLease(self, local, token)
            finally:
                renewing.cancel()
                release = asyncio.create_task(self._release(key, token))
                self._releases.add(release)
                release.add_done_callback(self._releases.discard)
                await asyncio.shield(release)

    async def _grant(
        self, local: SessionLease, token: str, deadline_s: float, needs_record: bool
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
                raise self.busy(key)
            await asyncio.sleep(min(remaining_s, pause_s * random.uniform(0.5, 1.5)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _reconcile(self, local: SessionLease, token: str, grant: Stored) -> None:
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

    async def commit(self, lease: RedisLease, record: SessionRecord) -> bool:
        """See `SessionLease.commit`. While Redis is down the turn is in memory alone, and pending."""
        key, before = lease.key, lease.record
        written = replace(
            record, expires_at_s=self.next_expiry_s(key, record), commit_id=secrets.token_hex(16)
        )
        if not lease.is_valid:
            return False
        if lease.token is not None:
            try:
                committed = await self._records.commit(key, lease.token, written)
            except StoreUnavailable as error:
                _log.warning("session stays in memory until Redis is back", error=error.message)
            else:
                self._pending.pop(key, None)
                return lease.put(written if committed else None) and committed
        if not lease.put(written):
            return False
        self._pending.setdefault(key, before.commit_id if before is not None else "")
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
        """As in memory; the copy here where Redis is down or has lost it."""
        copy = self.peek(key)
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
        found = await self._records.summaries(owner, documents=documents)
        for key in self._pending:
            copy = self.peek(key)
            if key.owner == owner and is_document(key) == documents and copy is not None:
                found[key] = copy.summary
        now_s = self._clock()
        return [(key, summary) for key, summary in found.items() if summary.expires_at_s > now_s]

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        """As in memory; of the copies here where Redis is down."""
        try:
            return await self._records.usage(owner, documents=documents, excluding=excluding)
        except StoreUnavailable:
            return await super().usage(owner, documents=documents, excluding=excluding)

    async def delete(self, key: SessionKey) -> None:
        """As in memory; deletes nothing where Redis is down, since the session would come back."""
        marker = f"deleted-{secrets.token_hex(16)}"
        deleted = await self._records.delete(key, marker, self.ttl_s(key))
        was_pending, was_used = key in self._pending, self._is_used(key)
        self._pending.pop(key, None)
        self._entries.pop(key, None)
        if not (deleted or was_pending or was_used):
            raise not_found(key)

    async def remove_stale(self) -> list[SessionKey]:
        """Writes turns back, drops outdated copies, and now and then removes what has expired in Redis."""
        await self._write_back()
        await self._clean()
        stale = [key for key in self._stale() if key not in self._pending]
        copies = [(key, record) for key, record in self._idle().items() if key not in self._pending]
        now_s = self._clock()
        expired = [key for key, record in copies if key in stale and record.expires_at_s <= now_s]
        try:
            commits = await self._records.commit_ids([key for key, _ in copies])
        except StoreUnavailable:
            return []
        there = {key for (key, _), commit in zip(copies, commits, strict=True) if commit}
        for (key, record), commit in zip(copies, commits, strict=True):
            if key in stale or (commit and commit != record.commit_id):
                self._forget_idle(key, record)
        return [key for key in expired if key not in there]

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
        await self._write_back()
        await self._records.close()

    async def _write_back(self) -> None:
        """Write the turns that Redis has missed, of sessions that no request has or waits for."""
        idle = self._idle()
        for key, base in list(self._pending.items()):
            record = idle.get(key)
            if record is None:
                if self.peek(key) is None and not self._is_used(key):
                    self._pending.pop(key, None)
                continue
            try:
                outcome = await self._records.write_back(key, base, self._instance, record)
            except StoreUnavailable:
                return
            if outcome == "written":
                self._on_event("written_back")
                if self.peek(key) is record:
                    self._pending.pop(key, None)
            elif outcome == "conflict":
                self._conflict(key)
                self._pending.pop(key, None)
                self._forget_idle(key, record)

    def _is_used(self, key: SessionKey) -> bool:
        """Whether a request has the session or waits for it."""
        return key in self._entries and self._entries[key].users > 0

    def _forget_idle(self, key: SessionKey, record: SessionRecord) -> None:
        """Drop this record, unless a turn has started since."""
        entry = self._entries.get(key)
        if entry is not None and entry.users == 0 and entry.record is record:
            del self._entries[key]

    def _conflict(self, key: SessionKey) -> None:
        self._on_event("conflict")
        _log.warning("turns made while Redis was down are dropped: another router has committed since")
