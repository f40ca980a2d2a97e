"""Session records in Redis: keys, scripts and encodings behind typed calls.

Below `redis_store.py`, which decides whose turn it is and what a failure means. Every call may raise
StoreUnavailable and may be repeated. `redis_scripts.py` has the scripts.

    session  hash   generation, holder, until (ms), committed, summary, record (its head),
                    part:0, part:1, ..., parts (how many), last (the id of the last one),
                    unstored (a mark: a turn after these is not here)
    index    zset   session id by expiry (Unix ms)
    tokens   hash   session id -> tokens of its record; '' -> their sum
    bytes    hash   likewise, bytes
    owners   set    every API key's owner, so that any router finds all indexes; one for all
    routers  zset   router by when it was last here (Unix ms); one for all
    readers  zset   likewise, of the routers that read parts

A commit writes the head and the parts that the turn adds, where the last part is the one that the router's
copy of the record has, and the whole record otherwise. While a router of an earlier release is there, which
would not find the parts, records are written whole as version 1 has them.

`holder` is the token of the lease. A commit needs it, and a delete or another router's lease removes it, so
two turns never both commit; `until` only says when others may take the session. The token begins with its
router's own part, because a router may take over from itself: it runs one turn of a session at a time. A
session without `committed` was never committed or was lost by Redis, since deletion leaves a marker
there; the index tells which of the two. A commit removes the mark of a turn that Redis has missed.

What has a record has no expiry of Redis's own, so that under `volatile-lru` Redis never evicts it for KV,
which has one. Routers remove what has expired by the index.

With keys (`at_rest.py`), `record`, `summary` and parts are encrypted with a key of the API key's. Ids, sizes
and times are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvferry.services.router.sessions import redis_scripts as scripts
from kvferry.services.router.sessions.record import KeyUsage, SessionRecord, SessionSummary
from kvferry.services.router.sessions.store import is_document
from kvferry.services.router.sessions.stored_record import (
    WrittenRecord,
    decode_summary,
    read_record,
    write_parts,
    write_whole,
)
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import CapacityExceeded, StoreUnavailable
from kvferry.shared.history.redis_client import AsyncRedisLink
from kvferry.shared.trust.at_rest import AtRestKeys, Unreadable, open_with

DELETED = "deleted-"
"""What a deletion's marker begins with."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A session as Redis has it.

    Attributes:
        commit_id: of the record, or the deletion's marker; empty where Redis has neither.
        record: None where there is none, or it has expired.
        lost: whether Redis should have a record, and has none.
        is_marked: whether a turn after this record was answered, and is not here.
    """

    commit_id: str
    record: SessionRecord | None
    lost: bool = False
    is_marked: bool = False

    @property
    def is_deleted(self) -> bool:
        return self.commit_id.startswith(DELETED)


class RedisRecords:
    """Args:
    clock: Unix time in seconds.
    name: of this router; one that starts again with the same name takes the former's place.
    on_unreplicated: called when a write is on a master alone, as no replica has confirmed it in time.
    keys: that encrypt records; None: they are not encrypted.
    """

    def __init__(
        self,
        link: AsyncRedisLink,
        *,
        clock: Callable[[], float],
        name: str,
        on_unreplicated: Callable[[], None] = lambda: None,
        keys: AtRestKeys | None = None,
    ) -> None:
        self._link = link
        self._on_unreplicated = on_unreplicated
        self._keys = keys
        self._clock = clock
        self._name = name
        self._known_owners: set[str] = set()
        self._writes_parts: bool | None = None
        """Whether all routers read parts; None until it is asked."""

    async def acquire(
        self, key: SessionKey, token: str, lease_s: float, *, known: SessionRecord | None = None
    ) -> Stored | None:
        """Lease the session; None while another router has it.

        Args: known: a copy of the record. While it is current, Redis does not send the record, which grows
            with every turn.
        """
        keys, commit_id = _keys(key)[:2], known.commit_id if known is not None else ""
        answer = await self._run(scripts.ACQUIRE, keys, token, _ms(lease_s), key.session_id, commit_id)
        if not answer[0]:
            return None
        try:
            return replace(
                self._stored(key, answer[3:], known), lost=bool(answer[1]), is_marked=bool(answer[2])
            )
        except StoreUnavailable:
            await self.release(key, token)
            raise

    async def renew(self, key: SessionKey, token: str, lease_s: float) -> bool:
        """Renew a lease; return whether it is still current."""
        return bool(await self._run(scripts.RENEW, [_session(key)], token, _ms(lease_s)))

    async def release(self, key: SessionKey, token: str) -> None:
        await self._run(scripts.RELEASE, [_session(key)], token)

    async def commit(
        self,
        key: SessionKey,
        token: str,
        base: str,
        record: SessionRecord,
        *,
        before: SessionRecord | None = None,
        max_bytes: int = 0,
    ) -> SessionRecord | None:
        """Commit a record. Returns the record as Redis has it now; None, and nothing is written, if the lease
        was no longer current.

        Args:
            base: the commit that the record follows; empty for none.
            before: what Redis has, as far as the router knows; only what the record adds to it is written.
            max_bytes: of the API key's sessions, or documents, together; 0: no limit.

        Raises: CapacityExceeded where they would have more.
        """
        if key.owner not in self._known_owners:
            await self._link.call(lambda client: client.sadd(_OWNERS, key.owner))
            self._known_owners.add(key.owner)
        if self._writes_parts is None:
            await self.register()
        for known in (before, None):
            written = write_parts(record, known) if self._writes_parts else write_whole(record)
            arguments = self._put_arguments(key, written)
            answer = await self._write(scripts.COMMIT, _keys(key), token, base, max_bytes, *arguments)
            if answer != _HAS_OTHER_PARTS:
                break
        if answer == _HAS_TOO_MANY_BYTES:
            raise CapacityExceeded(f"{record.size_bytes} bytes are too many for this key")
        return written.record if answer else None

    async def mark(self, key: SessionKey, token: str, commits: Sequence[str], ttl_s: float) -> None:
        """Note that the session lacks a turn that was answered, unless it has gone on without it.

        Args:
            token: of the turn's lease; empty where it had none.
            commits: those that the session has as long as it has not gone on; empty: any.
        """
        may_be_there = f"|{'|'.join(commits)}|" if commits else ""
        await self._write(scripts.MARK, [_session(key)], may_be_there, token, _ms(ttl_s))

    async def delete(self, key: SessionKey, marker: str, ttl_s: float) -> bool:
        """Leave only a marker; returns whether there was anything else."""
        return bool(await self._write(scripts.DELETE, _keys(key), marker, _ms(ttl_s), key.session_id))

    async def register(self) -> None:
        """Announce that this router is present and reads parts, and see whether all others do."""
        registers = [_ROUTERS, _READERS]
        self._writes_parts = not await self._run(
            scripts.REGISTER, registers, self._name, _ms(_FORGET_ROUTER_S)
        )

    async def read(self, key: SessionKey, *, known: SessionRecord | None = None) -> Stored:
        """Read a session. Args: known: as for `acquire`."""
        commit_id = known.commit_id if known is not None else ""
        return self._stored(key, await self._run(scripts.READ, [_session(key)], commit_id), known)

    async def commit_ids(self, keys: Sequence[SessionKey]) -> list[str]:
        """Return the commit id of each session; empty as in `Stored`."""
        return [(value or b"").decode() for value in await self._fields(keys, "committed")]

    async def summaries(self, owner: str, *, documents: bool) -> dict[SessionKey, SessionSummary]:
        """Return summaries of the owner's sessions, or of its documents."""
        ids = await self._run(scripts.LIST, _index(owner, documents)[:1])
        keys = [SessionKey(owner=owner, session_id=name.decode()) for name in ids]
        values = await self._fields(keys, "summary")
        return {
            key: decode_summary(self._opened(key, "summary", data))
            for key, data in zip(keys, values, strict=True)
            if data is not None
        }

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        records, tokens, size_bytes, first_ms = await self._run(
            scripts.USAGE, _index(owner, documents), excluding.session_id
        )
        return KeyUsage(
            num_records=records,
            num_tokens=tokens,
            size_bytes=size_bytes,
            first_expires_in_s=first_ms / 1000,
        )

    async def remove_expired(self) -> None:
        """Remove what has expired, of every API key."""
        owners = [name.decode() for name in await self._link.call(lambda client: client.smembers(_OWNERS))]
        for owner in owners:
            for documents in (False, True):
                index = _index(owner, documents)
                for name in await self._run(scripts.EXPIRED, index, _EXPIRED_AT_ONCE):
                    key = SessionKey(owner=owner, session_id=name.decode())
                    await self._run(scripts.EXPIRE, [_session(key), *index], key.session_id)

    async def evicts_records(self) -> bool:
        """Return whether Redis may evict records to make room for KV, by its configuration."""
        info = await self._link.call(lambda client: client.info("memory"))
        return str(info.get("maxmemory_policy", "")).startswith("allkeys")

    async def close(self) -> None:
        await self._link.close()

    def _stored(self, key: SessionKey, answer: Sequence[bytes], known: SessionRecord | None) -> Stored:
        """Read a script's answer: the commit, and unless it is that of the copy, the record and its parts."""
        commit_id, *values = answer
        if not values:
            return Stored(commit_id=commit_id.decode(), record=known)
        record = None
        if values[0]:
            head, parts = self._opened(key, "record", values[0]), values[1:]
            record = read_record(head, [self._opened(key, "part", part) for part in parts])
            if self._keys is not None and not all(map(self._keys.is_of_first_key, parts)):
                record = replace(record, parts=())  # so that the next commit encrypts all of it anew
            if record.expires_at_s <= self._clock():
                record = None
        return Stored(commit_id=commit_id.decode(), record=record)

    def _sealed(self, key: SessionKey, field: str, value: bytes) -> bytes:
        if self._keys is None:
            return value
        return self._keys.seal(key.owner, value, context=f"{key.session_id} {field}")

    def _opened(self, key: SessionKey, field: str, value: bytes) -> bytes:
        """Return what was sealed. Raises: StoreUnavailable, reason "key"."""
        try:
            return open_with(self._keys, key.owner, value, context=f"{key.session_id} {field}")
        except Unreadable as error:
            raise StoreUnavailable(
                f"session {key.session_id!r} cannot be decrypted: {error}", reason="key"
            ) from None

    def _put_arguments(self, key: SessionKey, written: WrittenRecord) -> list[str | bytes | int]:
        record = written.record
        return [
            self._sealed(key, "record", written.head),
            self._sealed(key, "summary", msgspec.msgpack.encode(record.summary)),
            record.commit_id,
            _ms(record.expires_at_s),
            key.session_id,
            len(record.token_ids),
            record.size_bytes,
            written.after,
            written.last,
            written.num_kept,
            *(self._sealed(key, "part", part) for part in written.parts),
        ]

    async def _run(self, script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        whole = scripts.PRELUDE + script
        return await self._link.call(lambda client: client.eval(whole, len(keys), *keys, *arguments))

    async def _write(self, script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        """Run a script whose effect must survive the loss of a master."""
        answer, replicated = await self._link.eval_replicated(scripts.PRELUDE + script, keys, *arguments)
        if not replicated:
            self._on_unreplicated()
        return answer

    async def _fields(self, keys: Sequence[SessionKey], field: str) -> list[bytes | None]:
        async def read(client: Any) -> list[bytes | None]:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.hget(_session(key), field)
            return list(await pipeline.execute())

        return await self._link.call(read) if keys else []


_OWNERS = "kvferry:router:owners"
_ROUTERS = "kvferry:router:routers"
_READERS = "kvferry:router:{kvferry:router:routers}:readers"
"""Those that read parts; in one hash slot with the others."""
_HAS_OTHER_PARTS, _HAS_TOO_MANY_BYTES = 2, 3
"""Answers of scripts that write parts."""
_FORGET_ROUTER_S = 300.0
"""A router that has not registered for so long is gone."""
_EXPIRED_AT_ONCE = 1000


def _session(key: SessionKey) -> str:
    return f"kvferry:router:{{{key.owner}}}:session:{key.session_id}"


def _index(owner: str, documents: bool) -> list[str]:
    kind = "documents" if documents else "sessions"
    return [f"kvferry:router:{{{owner}}}:{kind}{suffix}" for suffix in ("", ":tokens", ":bytes")]


def _keys(key: SessionKey) -> list[str]:
    return [_session(key), *_index(key.owner, is_document(key))]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
