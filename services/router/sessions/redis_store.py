"""Sessions in Redis: routers that share it see the same sessions and run each one's turns one at a time.

Records are in Redis and, for sessions that this router has served, copied in its memory. Guarantees:

- Of two turns that started from one record, one commits. DELETE wins over a running turn on any router.
- A turn that ends while Redis is down is written back when Redis returns. Until then, other routers that have
  missed Redis as well neither show nor continue sessions: they wait for every router that was there, for at
  most the time of a lease.
- Such a turn is announced to every prefill worker before it is acknowledged, and until it is written back.
  So a router that reaches Redis meanwhile does not continue the session without the turn (SessionPending),
  and a turn that another router has overtaken is not acknowledged.
- While Redis is down, a session continues whose last turn is known to be here: its turns wait to be written
  back, or there is no other router. Any other session is refused where its record matters.
- A turn that another router's commit has overtaken ends with an error, unless it was a whole conversation.
- A session that Redis has lost and nobody has a copy of is refused where its record matters.
- A Redis that lost its data gets it back from the copies. Copies of sessions deleted through another router
  are dropped within one round of sweeps, each of which compares 512 copies with Redis; only data lost within
  that time could bring such a session back.

Calls no workers but through `Announce`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import structlog

from kvferry.services.router.sessions.record import KeyUsage, SessionRecord, SessionSummary
from kvferry.services.router.sessions.redis_records import DELETED, RedisRecords, Stored
from kvferry.services.router.sessions.store import SessionLease, SessionStore, is_document, not_found, sized
from kvferry.shared.control.messages import (
    PendingInfo,
    PendingTurn,
    PendingTurns,
    SessionBase,
    SessionKey,
)
from kvferry.shared.errors import CapacityExceeded, SessionBusy, SessionPending, StoreUnavailable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_CLEANING_INTERVAL_S = 60.0
_COMPARED_AT_ONCE = 512
"""Copies in one sweep, so that requests do not wait while thousands are compared."""
_RETURNING = "returning"
"""Redis is back, and may not have every router's turns yet."""

_PENDING_LEASE_S, _ANNOUNCE_INTERVAL_S = 30.0, 5.0
_ANNOUNCED_AT_ONCE = 1000

_log = structlog.get_logger(__name__)


class Announce(Protocol):
    """The prefill workers, as `TurnRunner` calls them."""

    async def announce_pending(self, turns: PendingTurns) -> frozenset[SessionKey]:
        """Tell every worker; returns the sessions that another router has overtaken."""
        ...

    async def pending_turn(self, session: SessionKey) -> list[PendingInfo]:
        """What each worker knows."""
        ...


class RedisLease(SessionLease):
    """A lease that Redis granted under `token`; with None it is valid in this router alone."""

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

    @property
    def commit_id(self) -> str:
        """Of what the turn continues: the record, or a deletion's marker."""
        return self.record.commit_id if self.record is not None else self._commit_id

    @property
    def base(self) -> SessionBase | None:
        if not self.needs_record:
            return None
        return SessionBase(router=self._redis_store.instance, commit_id=self.commit_id)

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
        workers: where turns are announced.
        options: of `SessionStore`.

    Attributes: instance: random, of this start.
    """

    def __init__(
        self,
        records: RedisRecords,
        *,
        lease_s: float,
        on_event: Callable[[str], None],
        workers: Announce,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._records = records
        self._lease_s = lease_s
        self._on_event = on_event
        self._workers = workers
        self.instance = secrets.token_hex(8)
        self._pending: dict[SessionKey, tuple[str, ...]] = {}
        """Sessions with turns that are not in Redis yet, and the commits that may be there: the one that they
        build on, and their own, because a call that was given up may still arrive."""
        self._offline: set[SessionKey] = set()
        """Sessions with a turn that began without Redis."""
        self._has_peers = False
        self._settled_s = 0.0
        """A time at which Redis had every router's turns; as `RedisRecords.failed_s`."""
        self._releases: set[asyncio.Task[None]] = set()
        self._announcing: asyncio.Task[None] | None = None
        self._next_cleaning_s = 0.0
        self._next_compared = 0

    # ---- leases ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, key: SessionKey, *, needs_record: bool = True) -> AsyncIterator[RedisLease]:
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        async with super().lease(key) as local:
            token = f"{self.instance}.{secrets.token_hex(8)}"
            grant = await self._grant(local, token, deadline_s, needs_record)
            if grant is None:
                self._offline.add(key)
                try:
                    yield RedisLease(self, local, None, needs_record=needs_record)
                finally:
                    self._offline.discard(key)
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
                commit_id = grant.commit_id
                yield RedisLease(self, local, token, needs_record=needs_record, commit_id=commit_id)
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
        key = local.key
        try:
            await self._others_settle(key, deadline_s)
            return await self._acquire(key, token, deadline_s)
        except StoreUnavailable as error:
            is_known = key in self._pending or (local.record is not None and not self._has_peers)
            if error.reason in ("format", "key", _RETURNING) or (needs_record and not is_known):
                raise
            self._on_event("offline")
            _log.warning("session continues without Redis", error=error.message)
            return None

    async def _others_settle(self, key: SessionKey, deadline_s: float) -> None:
        """Wait until Redis has what other routers committed without it. Raises: StoreUnavailable."""
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while not await self._is_settled(key):
            if loop.time() >= deadline_s:
                raise StoreUnavailable(
                    "Redis was away, and another router may still have turns to write back",
                    reason=_RETURNING,
                    retry_after_s=1.0,
                )
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _is_settled(self, key: SessionKey) -> bool:
        """Whether no other router has a turn of the session that Redis lacks."""
        records = self._records
        if key in self._pending or self._settled_s > records.failed_s:
            return True
        now_s = time.monotonic()
        if now_s - records.failed_s < self._lease_s and await records.num_behind():
            return False
        self._settled_s = now_s
        return True

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
        """Bring the copy here up to date with Redis, or Redis with the copy."""
        key, ours = local.key, local.record
        bases = self._pending.get(key)
        lost = not grant.commit_id
        if ours is not None and (lost or (bases is not None and grant.commit_id in bases)):
            self._on_event("restored" if lost else "written_back")
            self._pending.setdefault(key, (ours.commit_id,))
            with suppress(StoreUnavailable):
                written = await self._records.commit(key, token, (grant.commit_id,), ours)
                self._pending.pop(key, None)
                local.put(written or ours)
            return
        if bases is not None:
            self._conflict(key)
        self._pending.pop(key, None)
        local.put(grant.record)

    async def commit(self, lease: RedisLease, record: SessionRecord) -> bool:
        """See `SessionLease.commit`. While Redis is down the turn is in memory alone, and pending."""
        key = lease.key
        expires_at_s, commit_id = self.next_expiry_s(key, record), secrets.token_hex(16)
        written = sized(replace(record, expires_at_s=expires_at_s, commit_id=commit_id, parts=()))
        if not lease.is_valid:
            return False
        bases = self._pending.get(key, (lease.commit_id,))
        try:
            if lease.token is not None:
                its = await self._records.commit(
                    key, lease.token, bases, written, before=lease.record, max_bytes=self._max_bytes
                )
            else:
                its = await self._records.write_back(key, bases, written)
        except CapacityExceeded:
            usage = await self.usage(key.owner, documents=is_document(key), excluding=key)
            raise self.too_many_bytes(key, usage, written.size_bytes) from None
        except StoreUnavailable as error:
            _log.warning("session stays in memory until Redis is back", error=error.message)
            if lease.needs_record and key in await self._announce([PendingTurn(session=key, bases=bases)]):
                self._on_event("conflict")
                raise _continued(key) from None
            if not lease.put(written):
                return False
            self._pending[key] = (*bases, written.commit_id)
            if self._announcing is None or self._announcing.done():
                self._announcing = asyncio.create_task(self._keep_announcing())
            return True
        self._pending.pop(key, None)
        lease_is_valid = lease.put(its)
        if its is not None:
            return lease_is_valid
        if lease.needs_record and not (await self._records.read(key)).is_deleted:
            raise _continued(key)
        return False

    async def _announce(self, turns: list[PendingTurn]) -> frozenset[SessionKey]:
        return await self._workers.announce_pending(
            PendingTurns(router=self.instance, lease_s=_PENDING_LEASE_S, turns=tuple(turns))
        )

    async def _keep_announcing(self) -> None:
        while self._pending:
            await asyncio.sleep(_ANNOUNCE_INTERVAL_S)
            turns = [PendingTurn(session=key, bases=bases[:-1]) for key, bases in self._pending.items()]
            for first in range(0, len(turns), _ANNOUNCED_AT_ONCE):
                await self._announce(turns[first : first + _ANNOUNCED_AT_ONCE])

    async def _check_pending(self, key: SessionKey, commit_id: str) -> None:
        """Raises: SessionPending: another router has acknowledged a turn after this commit."""
        if any(known.goes_beyond(commit_id) for known in await self._workers.pending_turn(key)):
            raise SessionPending.of(key.session_id)

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
            await self._others_settle(key, asyncio.get_running_loop().time() + self._wait_s)
            stored = await self._records.read(key, known=copy)
        except StoreUnavailable as error:
            if copy is None or error.reason == _RETURNING:
                raise
            return copy
        record = stored.record
        if copy is not None and (not stored.commit_id or key in self._pending):
            record = copy
        elif record is None or not is_document(key):
            await self._check_pending(key, stored.commit_id)
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
        marker = f"{DELETED}{secrets.token_hex(16)}"
        deleted = await self._records.delete(key, marker, self.ttl_s(key))
        was_pending, was_used = key in self._pending, self._is_used(key)
        self._pending.pop(key, None)
        self._entries.pop(key, None)
        if not (deleted or was_pending or was_used):
            await self._check_pending(key, "")
            raise not_found(key)

    async def remove_stale(self) -> dict[SessionKey, SessionRecord]:
        """Writes turns back, drops outdated copies, and now and then removes what has expired in Redis."""
        await self._write_back()
        with suppress(StoreUnavailable):
            if not self._pending:
                self._has_peers = await self._records.register()
        await self._clean()
        stale = self._stale().keys() - self._pending.keys()
        copies = self._to_compare(stale)
        now_s = self._clock()
        expired = {key: its for key, its in copies if key in stale and its.expires_at_s <= now_s}
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
        """Idle copies: all stale ones, and of the others those whose turn it is."""
        idle = {key: record for key, record in self._idle().items() if key not in self._pending}
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
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.wait((self._announcing,))
        if self._releases:
            await asyncio.wait(self._releases)
        await self._write_back()
        if not self._pending:
            with suppress(StoreUnavailable):
                await self._records.leave()
        await self._records.close()

    async def _write_back(self) -> None:
        """Write the turns that Redis has missed, but not of sessions whose turn has a lease in Redis."""
        idle = self._idle()
        for key, bases in list(self._pending.items()):
            record = idle.get(key) or (self.peek(key) if key in self._offline else None)
            if record is None:
                if self.peek(key) is None and not self._is_used(key):
                    self._pending.pop(key, None)
                continue
            try:
                written = await self._records.write_back(key, bases, record)
            except StoreUnavailable:
                return
            if written:
                self._on_event("written_back")
                if self.peek(key) is record:
                    self._pending.pop(key, None)
            else:
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


def _continued(key: SessionKey) -> SessionBusy:
    return SessionBusy(f"Session {key.session_id!r} was continued by another router meanwhile")
