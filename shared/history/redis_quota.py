"""The limit on history in Redis: an index of sizes, per API key and in all, that each write checks first.

An owner that needs more than the others leave loses its own least recently used sessions, never another
owner's. What cannot fit even so is refused (reason "quota") and stays in host memory only. An owner's index
changes in one step; the sum over owners is updated after it, so that several workers that write at once may
exceed the limit by what each is writing. Entries expire with their sessions, which repairs what a crash left
wrong.

    kvferry:history:1:{owner:<owner>}:sizes | :expiry    hash, sorted set: sizes of the owner's sessions; also
                                                         their sum under ''
    kvferry:history:1:{total}:sizes | :expiry            sizes of the owners
"""

from __future__ import annotations

import time
from typing import Any

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import StoreUnavailable
from kvferry.shared.history.redis_client import Client, RedisLink
from kvferry.shared.history.stored_format import FORMAT_VERSION

KEY_PREFIX = f"kvferry:history:{FORMAT_VERSION}:"

_PRELUDE = """
local function drop(member)
  redis.call('ZREM', KEYS[2], member)
  local size = redis.call('HGET', KEYS[1], member)
  if size then
    redis.call('HDEL', KEYS[1], member)
    redis.call('HINCRBY', KEYS[1], '', -size)
    if redis.call('HLEN', KEYS[1]) == 1 then redis.call('DEL', KEYS[1]) end
  end
end
"""
"""What both scripts begin with."""

# Expired members go first. Returns -1 if the member alone is too large, otherwise the sum and the members,
# least recently used first, that must be deleted to stay within the limit (0: no limit). Takes no longer for
# an owner of many sessions: the sum is kept, and only members that must go are looked at.
_RESERVE = f"""{_PRELUDE}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[3])) do drop(member) end
local limit, own, victims = tonumber(ARGV[5]), tonumber(ARGV[2]), {{}}
if limit > 0 and own > limit then return {{-1}} end
local before = redis.call('HGET', KEYS[1], ARGV[1]) or 0
redis.call('HSET', KEYS[1], ARGV[1], own)
local total, first = redis.call('HINCRBY', KEYS[1], '', own - before), 0
while limit > 0 and total > limit do
  local members = redis.call('ZRANGE', KEYS[2], first, first + 99)
  if #members == 0 then break end
  first = first + #members
  for _, member in ipairs(members) do
    local size = member ~= ARGV[1] and redis.call('HGET', KEYS[1], member)
    if size and total > limit then
      total = total - size
      victims[#victims + 1] = member
    end
  end
end
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
redis.call('PEXPIREAT', KEYS[1], ARGV[4])
redis.call('PEXPIREAT', KEYS[2], ARGV[4])
return {{total, unpack(victims)}}
"""

_RELEASE = f"""{_PRELUDE}
drop(ARGV[1])
return tonumber(redis.call('HGET', KEYS[1], '') or 0)
"""


class RedisQuota:
    """Thread-safe, as its link is."""

    def __init__(self, link: RedisLink, *, max_bytes: int, ttl_s: float) -> None:
        """Use a link's Redis. Args: max_bytes: limit over all owners; 0: no limit."""
        self._link = link
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self.total_bytes = 0
        """What all owners took when this worker last wrote or deleted."""

    def reserve(self, session: SessionKey, size_bytes: int) -> list[SessionKey]:
        """Count a session as so many bytes; return the sessions that must be deleted for it.

        Raises: StoreUnavailable, reason "quota" if it cannot fit, otherwise as `RedisLink.call`.
        """
        limit = self._limit(session.owner)
        now_ms = int(time.time() * 1000)
        expiry_ms = now_ms + int(self._ttl_s * 1000)
        arguments = (session.session_id, size_bytes, now_ms, expiry_ms, limit or 0)
        answer: list[Any] = [-1]
        if limit != 0:
            keys = _keys(_member(session.owner))
            answer = self._link.call(lambda client: client.eval(_RESERVE, 2, *keys, *arguments))
        if answer[0] < 0:
            raise StoreUnavailable(
                f"session {session.session_id!r} takes {size_bytes} bytes in Redis; its key may have {limit}",
                reason="quota",
            )
        self._set_owner(session.owner, int(answer[0]))
        return [SessionKey(owner=session.owner, session_id=name.decode()) for name in answer[1:]]

    def release(self, session: SessionKey) -> None:
        """Count a session as nothing. Raises: as `RedisLink.call`."""
        keys = _keys(_member(session.owner))
        left = self._link.call(lambda client: client.eval(_RELEASE, 2, *keys, session.session_id))
        self._set_owner(session.owner, int(left))

    def _limit(self, owner: str) -> int | None:
        """Return what the other owners leave of `max_bytes`; None: no limit."""
        if not self._max_bytes:
            return None
        now_ms = time.time() * 1000
        sizes, expiries = _keys("total")

        def read(pipeline: Client) -> None:
            pipeline.hgetall(sizes)
            pipeline.zrangebyscore(expiries, now_ms, "+inf")

        size_bytes, alive = self._link.pipeline(read)
        others = sum(int(size_bytes.get(name, 0)) for name in alive if name.decode() != _member(owner))
        return max(0, self._max_bytes - others)

    def _set_owner(self, owner: str, size_bytes: int) -> None:
        sizes, expiries = _keys("total")
        expiry_ms = int((time.time() + self._ttl_s) * 1000)

        def publish(pipeline: Client) -> None:
            if size_bytes:
                pipeline.hset(sizes, _member(owner), size_bytes)
                pipeline.zadd(expiries, {_member(owner): expiry_ms})
                pipeline.pexpireat(sizes, expiry_ms)
                pipeline.pexpireat(expiries, expiry_ms)
            else:
                pipeline.hdel(sizes, _member(owner))
                pipeline.zrem(expiries, _member(owner))
            pipeline.hvals(sizes)

        self.total_bytes = sum(map(int, self._link.pipeline(publish)[-1]))


def _member(owner: str) -> str:
    return f"owner:{owner}"


def _keys(what: str) -> tuple[str, str]:
    """Return the keys of the sizes and expiries of an owner's sessions, or of all owners ("total")."""
    return f"{KEY_PREFIX}{{{what}}}:sizes", f"{KEY_PREFIX}{{{what}}}:expiry"
