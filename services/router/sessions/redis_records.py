"""Session records in Redis: keys, scripts and encodings behind typed calls.

Below `redis_store.py`, which decides whose turn it is and what a failure means. Every call may raise
StoreUnavailable and may be repeated. Each script is atomic and touches keys of one API key only, which share
a hash slot, so that it runs on a cluster as well.

    session  hash   generation, holder, until (ms), committed, record, summary
    index    zset   session id by expiry (Unix ms)
    tokens   hash   session id -> tokens of its record; '' -> their sum
    owners   set    every API key's owner, so that any router finds all indexes; one for all
    routers  zset   router by when it last had nothing that Redis lacks (Unix ms); one for all

`holder` is the token of the lease. A commit needs it, and a delete or another router's lease removes it, so
two turns never both commit; `until` only says when others may take the session. The token begins with its
router's own part, because a router may take over from itself: it runs one turn of a session at a time. A
session without `committed` was never committed or was lost by Redis, since deletion leaves a marker
there; the index tells which of the two.

What has a record has no expiry of Redis's own, so that under `volatile-lru` Redis never evicts it for KV,
which has one. Routers remove what has expired by the index.

With keys (`at_rest.py`), `record` and `summary` are encrypted with a key of the API key's. Ids, sizes and
times are not.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from kvferry.services.router.sessions.record import (
    KeyUsage,
    SessionRecord,
    SessionSummary,
    decode_record,
    decode_summary,
    encode_record,
)
from kvferry.services.router.sessions.store import is_document
from kvferry.shared.at_rest import AtRestKeys, Unreadable, open_with
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import StoreUnavailable
from kvferry.shared.history.redis_client import AsyncRedisLink

_Result = TypeVar("_Result")


DELETED = "deleted-"
"""What a deletion's marker begins with."""
_PRELUDE = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function router_of(token) return string.match(token, '^[^.]*') end
local function extend(key, at_least_ms)
  if redis.call('HEXISTS', key, 'record') == 1 then return end
  if redis.call('PTTL', key) < at_least_ms then redis.call('PEXPIRE', key, at_least_ms) end
end
local function count(id, num_tokens)
  -- `num_tokens` nil: the record is gone. The sum is there once someone has asked for it.
  local before = redis.call('HGET', KEYS[3], id) or 0
  if num_tokens then redis.call('HSET', KEYS[3], id, num_tokens) else redis.call('HDEL', KEYS[3], id) end
  if redis.call('HEXISTS', KEYS[3], '') == 1 then
    redis.call('HINCRBY', KEYS[3], '', (num_tokens or 0) - before)
    if redis.call('HLEN', KEYS[3]) == 1 then redis.call('DEL', KEYS[3]) end
  end
end
local function put(offset)
  -- ARGV from offset: record, summary, commit_id, expires_ms, session_id, num_tokens
  redis.call('HSET', KEYS[1], 'record', ARGV[offset], 'summary', ARGV[offset + 1],
             'committed', ARGV[offset + 2])
  redis.call('PERSIST', KEYS[1])
  redis.call('ZADD', KEYS[2], ARGV[offset + 3], ARGV[offset + 4])
  count(ARGV[offset + 4], ARGV[offset + 5])
  return 1
end
"""
"""What all scripts begin with."""

_ACQUIRE = """
-- KEYS session, index; ARGV token, lease_ms, session_id, the commit that the router has a copy of. Returns
-- {1, committed, record (empty if there is none or it is the copy), whether the index has a session that is
-- not there} or {0}.
local fields = redis.call('HMGET', KEYS[1], 'holder', 'until', 'committed')
local same_router = fields[1] and router_of(fields[1]) == router_of(ARGV[1])
if fields[1] and not same_router and tonumber(fields[2]) > now_ms then return {0} end
redis.call('HINCRBY', KEYS[1], 'generation', 1)
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'until', now_ms + ARGV[2])
extend(KEYS[1], ARGV[2] * 4)
local expires_ms = redis.call('ZSCORE', KEYS[2], ARGV[3])
local lost = not fields[3] and expires_ms and tonumber(expires_ms) > now_ms
local record = fields[3] ~= ARGV[4] and redis.call('HGET', KEYS[1], 'record')
return {1, fields[3] or '', record or '', lost and 1 or 0}
"""

_RENEW = """
-- KEYS session; ARGV token, lease_ms. Returns whether the lease is current, or was lost with all data.
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder == ARGV[1] then
  redis.call('HSET', KEYS[1], 'until', now_ms + ARGV[2])
  extend(KEYS[1], ARGV[2] * 4)
  return 1
end
return 1 - redis.call('EXISTS', KEYS[1])
"""

_RELEASE = """
-- KEYS session; ARGV token.
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then
  redis.call('HDEL', KEYS[1], 'holder', 'until')
  if redis.call('HEXISTS', KEYS[1], 'committed') == 0 then redis.call('DEL', KEYS[1]) end
end
return 1
"""

_COMMIT = """
-- KEYS session, index, tokens; ARGV token, the commits that the record may follow as in `_WRITE_BACK`, then
-- as `put`. Returns whether the lease was still current. A failover may lose the lease alone: then nobody has
-- it, and nobody has committed.
local fields = redis.call('HMGET', KEYS[1], 'holder', 'committed')
if fields[1] ~= ARGV[1] and redis.call('EXISTS', KEYS[1]) == 1 then
  if fields[1] or not string.find(ARGV[2], '|' .. (fields[2] or '') .. '|', 1, true) then return 0 end
end
return put(3)
"""

_WRITE_BACK = """
-- KEYS session, index, tokens; ARGV the commits that the record may follow ('' for none), each between two
-- bars, then as `put`. Returns 0 where the session has another commit. Whoever leased the session began from
-- an older record, or with a call that arrived late: that lease ends.
local committed = redis.call('HGET', KEYS[1], 'committed')
if committed == ARGV[4] then return 1 end
if committed and not string.find(ARGV[1], '|' .. committed .. '|', 1, true) then return 0 end
redis.call('HDEL', KEYS[1], 'holder', 'until')
return put(2)
"""

_DELETE = """
-- KEYS session, index, tokens; ARGV marker, ttl_ms, session_id. Returns whether there was anything.
local fields = redis.call('HMGET', KEYS[1], 'holder', 'record', 'committed', 'generation')
if fields[3] == ARGV[1] then return 1 end
redis.call('ZREM', KEYS[2], ARGV[3])
count(ARGV[3], nil)
if not fields[1] and not fields[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'generation', fields[4] + 1, 'committed', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

_LIST = """
-- KEYS index. Returns the ids of what has not expired.
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now_ms, '+inf')
"""

_USAGE = """
-- KEYS index, tokens; ARGV an id to leave out. Returns {records, tokens, ms until the first expires}. Takes
-- as long as there are expired sessions that nobody has removed yet, however many others there are.
local sum = redis.call('HGET', KEYS[2], '')
if not sum then
  sum = 0
  for _, num_tokens in ipairs(redis.call('HVALS', KEYS[2])) do sum = sum + num_tokens end
  if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], '', sum) end
end
local records, tokens = redis.call('ZCARD', KEYS[1]), tonumber(sum)
local function without(id)
  records, tokens = records - 1, tokens - (redis.call('HGET', KEYS[2], id) or 0)
end
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms)
for _, id in ipairs(expired) do without(id) end
local expires_ms = redis.call('ZSCORE', KEYS[1], ARGV[1])
if expires_ms and tonumber(expires_ms) > now_ms then without(ARGV[1]) end
local first_ms = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now_ms, '+inf', 'LIMIT', 0, 2)) do
  if id ~= ARGV[1] and first_ms == 0 then first_ms = redis.call('ZSCORE', KEYS[1], id) - now_ms end
end
return {records, tokens, first_ms}
"""

_REGISTER = """
-- KEYS routers; ARGV name, forget_ms. Returns the other routers.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[2])
local others = redis.call('ZRANGE', KEYS[1], 0, -1)
redis.call('ZADD', KEYS[1], now_ms, ARGV[1])
return others
"""

_BEHIND = """
-- KEYS routers; ARGV name, forget_ms, since_ms. Returns how many others have not registered for `since_ms`.
local behind = 0
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now_ms - ARGV[2], now_ms - ARGV[3])) do
  if name ~= ARGV[1] then behind = behind + 1 end
end
return behind
"""

_EXPIRED = """
-- KEYS index, tokens; ARGV how many. Returns ids of what has expired. The sum is added up again when it is
-- next needed: routers of earlier releases do not keep it.
redis.call('HDEL', KEYS[2], '')
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, ARGV[1])
"""

_EXPIRE = """
-- KEYS session, index, tokens; ARGV session_id. Removes a session that has expired, unless a turn has it.
local expires_ms = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not expires_ms or tonumber(expires_ms) > now_ms then return 0 end
local fields = redis.call('HMGET', KEYS[1], 'holder', 'until', 'record')
if fields[1] and tonumber(fields[2]) > now_ms then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
count(ARGV[1], nil)
if fields[3] then redis.call('DEL', KEYS[1]) end
return 1
"""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A session as Redis has it.

    Attributes:
        commit_id: of the record, or the deletion's marker; empty where Redis has neither.
        record: None where there is none, or it has expired.
        lost: whether Redis should have a record, and has none.
    """

    commit_id: str
    record: SessionRecord | None
    lost: bool = False

    @property
    def is_deleted(self) -> bool:
        return self.commit_id.startswith(DELETED)


class RedisRecords:
    """Args:
    clock: Unix time in seconds.
    name: of this router; one that starts again with the same name takes the former's place.
    on_unreplicated: called when a write is on a master alone, as no replica has confirmed it in time.
    keys: that encrypt records; None: they are not encrypted.

    Attributes: failed_s: when Redis last failed, or this router began; on the clock of `time.monotonic`.
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
        self.failed_s = time.monotonic()
        self._known_owners: set[str] = set()

    # ---- leases ------------------------------------------------------------------------------------------

    async def acquire(
        self, key: SessionKey, token: str, lease_s: float, *, known: SessionRecord | None = None
    ) -> Stored | None:
        """Lease the session; None while another router has it.

        Args: known: a copy of the record. While it is current, Redis does not send the record, which grows
            with every turn.
        """
        keys, commit_id = _keys(key)[:2], known.commit_id if known is not None else ""
        answer = await self._run(_ACQUIRE, keys, token, _ms(lease_s), key.session_id, commit_id)
        if not answer[0]:
            return None
        if commit_id and answer[1].decode() == commit_id:
            return Stored(commit_id=commit_id, record=known)
        try:
            return replace(self._stored(key, answer[2], answer[1]), lost=bool(answer[3]))
        except StoreUnavailable:
            await self.release(key, token)
            raise

    async def renew(self, key: SessionKey, token: str, lease_s: float) -> bool:
        """Returns whether the lease is still current."""
        return bool(await self._run(_RENEW, [_session(key)], token, _ms(lease_s)))

    async def release(self, key: SessionKey, token: str) -> None:
        await self._run(_RELEASE, [_session(key)], token)

    async def commit(self, key: SessionKey, token: str, bases: Sequence[str], record: SessionRecord) -> bool:
        """Returns whether the lease was still current; nothing is written otherwise.

        Args: bases: the commits that the record may follow; an empty one stands for no commit.
        """
        return bool(await self._put(_COMMIT, [token, f"|{'|'.join(bases)}|"], key, record))

    async def write_back(self, key: SessionKey, bases: Sequence[str], record: SessionRecord) -> bool:
        """Write a record that this router committed in its memory, on top of one of these commits. Returns
        False where there is another."""
        return bool(await self._put(_WRITE_BACK, [f"|{'|'.join(bases)}|"], key, record))

    async def delete(self, key: SessionKey, marker: str, ttl_s: float) -> bool:
        """Leave only a marker; returns whether there was anything else."""
        return bool(await self._write(_DELETE, _keys(key), marker, _ms(ttl_s), key.session_id))

    # ---- routers -----------------------------------------------------------------------------------------

    async def register(self) -> bool:
        """Say that Redis has all of this router's turns; returns whether there are other routers."""
        others = await self._run(_REGISTER, [_ROUTERS], self._name, _ms(_FORGET_ROUTER_S))
        return any(name.decode() != self._name for name in others)

    async def leave(self) -> None:
        await self._call(lambda client: client.zrem(_ROUTERS, self._name))

    async def num_behind(self) -> int:
        """How many other routers may have turns that Redis has missed, since it last failed here."""
        since_ms = _ms(time.monotonic() - self.failed_s)
        return int(await self._run(_BEHIND, [_ROUTERS], self._name, _ms(_FORGET_ROUTER_S), since_ms))

    # ---- reading -----------------------------------------------------------------------------------------

    async def read(self, key: SessionKey) -> Stored:
        data, commit_id = await self._call(lambda client: client.hmget(_session(key), "record", "committed"))
        return self._stored(key, data, commit_id)

    async def commit_ids(self, keys: Sequence[SessionKey]) -> list[str]:
        """Of each session; empty as in `Stored`."""
        return [(value or b"").decode() for value in await self._fields(keys, "committed")]

    async def summaries(self, owner: str, *, documents: bool) -> dict[SessionKey, SessionSummary]:
        """Of the owner's sessions, or of its documents."""
        ids = await self._run(_LIST, _index(owner, documents)[:1])
        keys = [SessionKey(owner=owner, session_id=name.decode()) for name in ids]
        values = await self._fields(keys, "summary")
        return {
            key: decode_summary(self._opened(key, "summary", data))
            for key, data in zip(keys, values, strict=True)
            if data is not None
        }

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        records, tokens, first_ms = await self._run(_USAGE, _index(owner, documents), excluding.session_id)
        return KeyUsage(num_records=records, num_tokens=tokens, first_expires_in_s=first_ms / 1000)

    async def remove_expired(self) -> None:
        """Remove what has expired, of every API key."""
        owners = [name.decode() for name in await self._call(lambda client: client.smembers(_OWNERS))]
        for owner in owners:
            for documents in (False, True):
                index = _index(owner, documents)
                for name in await self._run(_EXPIRED, index, _EXPIRED_AT_ONCE):
                    key = SessionKey(owner=owner, session_id=name.decode())
                    await self._run(_EXPIRE, [_session(key), *index], key.session_id)

    async def evicts_records(self) -> bool:
        """Whether Redis may evict records to make room for KV, by its configuration."""
        info = await self._call(lambda client: client.info("memory"))
        return str(info.get("maxmemory_policy", "")).startswith("allkeys")

    async def close(self) -> None:
        await self._link.close()

    def _stored(self, key: SessionKey, data: bytes | None, commit_id: bytes | None) -> Stored:
        record = decode_record(self._opened(key, "record", data)) if data else None
        if record is not None and record.expires_at_s <= self._clock():
            record = None
        return Stored(commit_id=(commit_id or b"").decode(), record=record)

    def _sealed(self, key: SessionKey, field: str, value: bytes) -> bytes:
        if self._keys is None:
            return value
        return self._keys.seal(key.owner, value, context=f"{key.session_id} {field}")

    def _opened(self, key: SessionKey, field: str, value: bytes) -> bytes:
        """What was sealed. Raises: StoreUnavailable, reason "key"."""
        try:
            return open_with(self._keys, key.owner, value, context=f"{key.session_id} {field}")
        except Unreadable as error:
            raise StoreUnavailable(
                f"session {key.session_id!r} cannot be decrypted: {error}", reason="key"
            ) from None

    # ---- calls -------------------------------------------------------------------------------------------

    async def _put(self, script: str, first: list[str], key: SessionKey, record: SessionRecord) -> int:
        if key.owner not in self._known_owners:
            await self._call(lambda client: client.sadd(_OWNERS, key.owner))
            self._known_owners.add(key.owner)
        return int(
            await self._write(
                script,
                _keys(key),
                *first,
                self._sealed(key, "record", encode_record(record)),
                self._sealed(key, "summary", msgspec.msgpack.encode(record.summary)),
                record.commit_id,
                _ms(record.expires_at_s),
                key.session_id,
                len(record.token_ids),
            )
        )

    async def _call(self, operation: Callable[[Any], Awaitable[_Result]]) -> _Result:
        try:
            return await self._link.call(operation)
        except StoreUnavailable:
            self.failed_s = time.monotonic()
            raise

    async def _run(self, script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        whole = _PRELUDE + script
        return await self._call(lambda client: client.eval(whole, len(keys), *keys, *arguments))

    async def _write(self, script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        """Run a script whose effect must survive the loss of a master."""
        try:
            answer, replicated = await self._link.eval_replicated(_PRELUDE + script, keys, *arguments)
        except StoreUnavailable:
            self.failed_s = time.monotonic()
            raise
        if not replicated:
            self._on_unreplicated()
        return answer

    async def _fields(self, keys: Sequence[SessionKey], field: str) -> list[bytes | None]:
        """One field of many sessions."""

        async def read(client: Any) -> list[bytes | None]:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.hget(_session(key), field)
            return list(await pipeline.execute())

        return await self._call(read) if keys else []


_OWNERS = "kvferry:router:owners"
_ROUTERS = "kvferry:router:routers"
_FORGET_ROUTER_S = 300.0
"""A router that has not registered for so long is gone."""
_EXPIRED_AT_ONCE = 1000


def _session(key: SessionKey) -> str:
    return f"kvferry:router:{{{key.owner}}}:session:{key.session_id}"


def _index(owner: str, documents: bool) -> list[str]:
    kind = "documents" if documents else "sessions"
    return [f"kvferry:router:{{{owner}}}:{kind}", f"kvferry:router:{{{owner}}}:{kind}:tokens"]


def _keys(key: SessionKey) -> list[str]:
    return [_session(key), *_index(key.owner, is_document(key))]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
