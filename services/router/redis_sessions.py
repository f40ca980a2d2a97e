"""Sessions in Redis: routers that share it see the same sessions and run each one's turns one at a time.

Records lie in Redis and, of the sessions that this router has served, here as well. Guarantees:

- Of two turns that began from one record, one commits. DELETE wins over a turn under way anywhere.
- While Redis is away, sessions that this router has a copy of go on here; their turns are written back when
  it returns, unless another router has committed meanwhile: the first commit stands, and the turns made here
  are dropped and counted. A session without a copy here is refused where its record matters.
- A Redis that lost its data gets it back from the copies. Copies of what was deleted through another router
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

from kvferry.services.router.redis_records import Kept, RedisRecords
from kvferry.services.router.session_record import KeyUsage, SessionRecord, SessionSummary, is_document
from kvferry.services.router.sessions import MemoryLease, MemorySessionStore, busy, not_found
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import StoreUnavailable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25

_log = structlog.get_logger(__name__)


class RedisLease:
    """Implements `SessionLease`. One that Redis did not grant is of this router alone."""

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
        return self._local.holds and (not self.granted or await self._store.renew(self.key, self.token))

    async def commit(self, record: SessionRecord) -> bool:
        return await self._store.commit(self._local, record, self.token if self.granted else None)


class RedisSessionStore:
    """Implements `SessionStore`.

        lease: wait here ──► wait in Redis ──► turn, renewing ──► commit ──► release
                                  └─ Redis away: the copy here ──► commit here ──► pending ──► written back

    Args:
        local: waits within this router, and the copies.
        lease_s: a router that does not renew for so long loses its turn to who asks next.
        wait_s: how long a request awaits its session's turn.
        on_event: told "offline", "written_back", "restored" or "conflict".
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
        """Sessions with turns that Redis has not got, and the commit there that they go on from."""
        self._releases: set[asyncio.Task[None]] = set()

    # ---- a turn ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, key: SessionKey, *, needs_record: bool = True) -> AsyncIterator[RedisLease]:
        """See `SessionStore.lease`."""
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
    ) -> Kept | None:
        """Take the session in Redis; None where the turn can do without."""
        try:
            return await self._acquire(local.key, token, deadline_s)
        except StoreUnavailable as error:
            if error.reason == "format" or (needs_record and local.record is None):
                raise
            self._on_event("offline")
            _log.warning("session goes on without Redis", error=error.message)
            return None

    async def _acquire(self, key: SessionKey, token: str, deadline_s: float) -> Kept:
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

    async def _reconcile(self, local: MemoryLease, token: str, grant: Kept) -> None:
        """Make the copy here what the session is."""
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
        local.keep(grant.record)

    async def commit(self, local: MemoryLease, record: SessionRecord, token: str | None) -> bool:
        """A lease's commit; `token` is None where Redis has not granted it."""
        key = local.key
        before = local.record
        written = replace(
            record, expires_at_s=self._local.next_expiry_s(key), commit_id=secrets.token_hex(16)
        )
        if not local.holds:
            return False
        base = before.commit_id if before is not None else ""
        if token is not None:
            try:
                if not await self._records.commit(key, token, written):
                    local.keep(None)
                    self._pending.pop(key, None)
                    return False
            except StoreUnavailable as error:
                _log.warning("session kept here until Redis is back", error=error.message)
            else:
                self._pending.pop(key, None)
                return local.keep(written)
        if not local.keep(written):
            return False
        self._pending.setdefault(key, base)
        return True

    async def renew(self, key: SessionKey, token: str) -> bool:
        """Hold a lease for longer; returns whether it is held, as far as one can know."""
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
        # What cannot be released now ends with its lease.
        with suppress(StoreUnavailable):
            await self._records.release(key, token)

    # ---- records -----------------------------------------------------------------------------------------

    async def get(self, key: SessionKey) -> SessionRecord:
        """See `SessionStore.get`; the copy here where Redis is away or has lost it."""
        copy = self._local.peek(key)
        try:
            kept = await self._records.read(key)
        except StoreUnavailable:
            if copy is None:
                raise
            return copy
        record = kept.record
        if copy is not None and (not kept.commit_id or key in self._pending):
            record = copy
        if record is None or record.expires_at_s <= self._clock():
            raise not_found(key)
        return record

    async def owned_by(self, owner: str, *, documents: bool) -> list[tuple[SessionKey, SessionSummary]]:
        """See `SessionStore.owned_by`."""
        found = await self._records.summaries(owner, documents=documents)
        for key in self._pending:
            copy = self._local.peek(key)
            if key.owner == owner and is_document(key) == documents and copy is not None:
                found[key] = copy.summary
        now_s = self._clock()
        return [(key, summary) for key, summary in found.items() if summary.expires_at_s > now_s]

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        """See `SessionStore.usage`; of the copies here where Redis is away."""
        try:
            return await self._records.usage(owner, documents=documents, excluding=excluding)
        except StoreUnavailable:
            return await self._local.usage(owner, documents=documents, excluding=excluding)

    async def delete(self, key: SessionKey) -> None:
        """See `SessionStore.delete`. Deletes nothing where Redis is away, for it would come back."""
        marker = f"deleted-{secrets.token_hex(16)}"
        deleted = await self._records.delete(key, marker, self._local.ttl_s(key))
        deleted = deleted or self._pending.pop(key, None) is not None or self._local.is_used(key)
        self._pending.pop(key, None)
        self._local.forget(key)
        if not deleted:
            raise not_found(key)

    async def remove_stale(self) -> list[SessionKey]:
        """See `SessionStore.remove_stale`. Redis drops expired records by itself; this writes turns back,
        and drops copies that are out of date."""
        await self._write_back()
        stale = [key for key in self._local.stale() if key not in self._pending]
        kept = [(key, record) for key, record in self._local.idle_records() if key not in self._pending]
        now_s = self._clock()
        expired = [key for key, record in kept if key in stale and record.expires_at_s <= now_s]
        try:
            commits = await self._records.commit_ids([key for key, _ in kept])
        except StoreUnavailable:
            return []
        there = {key for (key, _), commit in zip(kept, commits, strict=True) if commit}
        for (key, record), commit in zip(kept, commits, strict=True):
            if key in stale or (commit and commit != record.commit_id):
                self._local.forget_idle(key, record)
        return [key for key in expired if key not in there]

    async def close(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases)
        await self._write_back()
        await self._records.close()

    async def _write_back(self) -> None:
        """Give Redis the turns that it has missed, of sessions that nobody uses now."""
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
        _log.warning("turns made while Redis was away are dropped: the session has gone on elsewhere")
