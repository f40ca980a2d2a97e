"""What runs inside Redis for sessions: one atomic script each for taking, keeping and ending a turn.

Used by `redis_records.py` alone. Every script touches keys of one API key only, which share a hash slot, so
that they run on a cluster as well.

    session  hash   generation, holder, until (ms), committed, record, summary
    index    zset   session id by expiry (Unix ms)
    tokens   hash   session id -> tokens of its record

`holder` is the token of the lease; a commit needs it, and a delete or another router's lease takes it away,
so that two turns never both commit: the deadline `until` only says when others may take it. It begins with
its router's own part, for a router may take over from itself: it runs one turn of a session at a time. What
has no `committed` was never committed or was lost by Redis, for deletion leaves a marker there.
"""

from __future__ import annotations

_NOW = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function router_of(token) return string.match(token, '^[^.]*') end
local function keep(key, at_least_ms)
  if redis.call('PTTL', key) < at_least_ms then redis.call('PEXPIRE', key, at_least_ms) end
end
"""

ACQUIRE = (
    _NOW
    + """
-- KEYS session; ARGV token, lease_ms. Returns {1, committed, record} or {0}.
local held = redis.call('HMGET', KEYS[1], 'holder', 'until', 'committed', 'record')
local same_router = held[1] and router_of(held[1]) == router_of(ARGV[1])
if held[1] and not same_router and tonumber(held[2]) > now_ms then return {0} end
redis.call('HINCRBY', KEYS[1], 'generation', 1)
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'until', now_ms + ARGV[2])
keep(KEYS[1], ARGV[2] * 4)
return {1, held[3] or '', held[4] or ''}
"""
)

RENEW = (
    _NOW
    + """
-- KEYS session; ARGV token, lease_ms. Returns whether the lease is still held, or was lost with all data.
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder == ARGV[1] then
  redis.call('HSET', KEYS[1], 'until', now_ms + ARGV[2])
  keep(KEYS[1], ARGV[2] * 4)
  return 1
end
return 1 - redis.call('EXISTS', KEYS[1])
"""
)

RELEASE = """
-- KEYS session; ARGV token.
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then
  redis.call('HDEL', KEYS[1], 'holder', 'until')
  if redis.call('HEXISTS', KEYS[1], 'committed') == 0 then redis.call('DEL', KEYS[1]) end
end
return 1
"""

_PUT = """
local function put(offset)
  -- ARGV from offset: record, summary, commit_id, ttl_ms, expires_ms, session_id, num_tokens
  redis.call('HSET', KEYS[1], 'record', ARGV[offset], 'summary', ARGV[offset + 1],
             'committed', ARGV[offset + 2])
  redis.call('PEXPIRE', KEYS[1], ARGV[offset + 3])
  redis.call('ZADD', KEYS[2], ARGV[offset + 4], ARGV[offset + 5])
  redis.call('HSET', KEYS[3], ARGV[offset + 5], ARGV[offset + 6])
  keep(KEYS[2], tonumber(ARGV[offset + 3]))
  keep(KEYS[3], tonumber(ARGV[offset + 3]))
  return 1
end
"""

COMMIT = (
    _NOW
    + _PUT
    + """
-- KEYS session, index, tokens; ARGV token, then as `put`. Returns whether the turn still had the session.
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder ~= ARGV[1] and redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
return put(2)
"""
)

WRITE_BACK = (
    _NOW
    + _PUT
    + """
-- KEYS session, index, tokens; ARGV the commit that the record goes on from ('' for none), the router, then
-- as `put`. Returns 1, 0 where the session has gone on without it, 2 while another router has it. Who writes
-- back has no turn of the session: what it holds is left over from a call that came too late.
local held = redis.call('HMGET', KEYS[1], 'holder', 'until', 'committed')
if held[3] == ARGV[5] then return 1 end
local ours = held[1] and router_of(held[1]) == ARGV[2]
if held[1] and not ours and tonumber(held[2]) > now_ms then return 2 end
if held[3] and held[3] ~= ARGV[1] then return 0 end
if ours then redis.call('HDEL', KEYS[1], 'holder', 'until') end
return put(3)
"""
)

DELETE = """
-- KEYS session, index, tokens; ARGV marker, ttl_ms, session_id. Returns whether there was anything.
local held = redis.call('HMGET', KEYS[1], 'holder', 'record', 'committed', 'generation')
if held[3] == ARGV[1] then return 1 end
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('HDEL', KEYS[3], ARGV[3])
if not held[1] and not held[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'generation', held[4] + 1, 'committed', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

_PRUNE = """
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms)) do
  redis.call('ZREM', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
end
"""

LIST = (
    _NOW
    + _PRUNE
    + """
-- KEYS index, tokens. Returns the ids of what has not expired.
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""
)

USAGE = (
    _NOW
    + _PRUNE
    + """
-- KEYS index, tokens; ARGV an id to leave out. Returns {records, tokens}.
local records, tokens = redis.call('ZCARD', KEYS[1]), 0
for _, count in ipairs(redis.call('HVALS', KEYS[2])) do tokens = tokens + count end
local left_out = redis.call('HGET', KEYS[2], ARGV[1])
if left_out then records, tokens = records - 1, tokens - left_out end
return {records, tokens}
"""
)
