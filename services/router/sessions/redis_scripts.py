"""The Lua scripts of `redis_records.py`, which describes the keys.

Each is atomic and touches keys of one API key only, which share a hash slot, so that it runs on a cluster as
well. `PRELUDE` goes before each.
"""

from __future__ import annotations

PRELUDE = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function router_of(token) return string.match(token, '^[^.]*') end
local function extend(key, at_least_ms)
  if redis.call('HEXISTS', key, 'record') == 1 then return end
  if redis.call('PTTL', key) < at_least_ms then redis.call('PEXPIRE', key, at_least_ms) end
end
local function count_in(counts, id, value)
  -- `value` nil: the record is gone. The sum is there once someone has asked for it.
  local before = redis.call('HGET', counts, id) or 0
  if value then redis.call('HSET', counts, id, value) else redis.call('HDEL', counts, id) end
  if redis.call('HEXISTS', counts, '') == 1 then
    redis.call('HINCRBY', counts, '', (value or 0) - before)
    if redis.call('HLEN', counts) == 1 then redis.call('DEL', counts) end
  end
end
local function count(id, num_tokens, num_bytes)
  count_in(KEYS[3], id, num_tokens)
  count_in(KEYS[4], id, num_bytes)
end
local function sum(counts, index)
  local known = redis.call('HGET', counts, '')
  if known then return tonumber(known) end
  local all, found = 0, redis.call('HGETALL', counts)
  for at = 1, #found, 2 do
    -- Routers of earlier releases leave the bytes of what they delete.
    if redis.call('ZSCORE', index, found[at]) then all = all + found[at + 1]
    else redis.call('HDEL', counts, found[at]) end
  end
  if redis.call('EXISTS', counts) == 1 then redis.call('HSET', counts, '', all) end
  return all
end
local function sum_without(counts, index, id)
  -- Of the others that have not expired. Takes as long as there are expired sessions that nobody has removed
  -- yet, however many others there are.
  local all = sum(counts, index) - (redis.call('HGET', counts, id) or 0)
  for _, expired in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now_ms)) do
    if expired ~= id then all = all - (redis.call('HGET', counts, expired) or 0) end
  end
  return all
end
local function stored(answer)
  -- Adds the record and its parts to an answer.
  local record, parts = unpack(redis.call('HMGET', KEYS[1], 'record', 'parts'))
  answer[#answer + 1] = record or ''
  for index = 0, tonumber(parts or 0) - 1 do
    answer[#answer + 1] = redis.call('HGET', KEYS[1], 'part:' .. index) or ''
  end
  return answer
end
local function put(offset)
  -- ARGV from offset: record, summary, commit_id, expires_ms, session_id, num_tokens, num_bytes, the last
  -- part that it is written after ('' for any record or none), its own last part, how many parts stay, the
  -- parts after them. Returns 2, and writes nothing, where there is another last part.
  local last, parts = unpack(redis.call('HMGET', KEYS[1], 'last', 'parts'))
  if ARGV[offset + 7] ~= '' and ARGV[offset + 7] ~= last then return 2 end
  local num_parts = tonumber(ARGV[offset + 9])
  for index = offset + 10, #ARGV do
    redis.call('HSET', KEYS[1], 'part:' .. num_parts, ARGV[index])
    num_parts = num_parts + 1
  end
  for index = num_parts, tonumber(parts or 0) - 1 do redis.call('HDEL', KEYS[1], 'part:' .. index) end
  redis.call('HSET', KEYS[1], 'record', ARGV[offset], 'summary', ARGV[offset + 1],
             'committed', ARGV[offset + 2], 'last', ARGV[offset + 8], 'parts', num_parts)
  redis.call('HDEL', KEYS[1], 'unstored')
  redis.call('PERSIST', KEYS[1])
  redis.call('ZADD', KEYS[2], ARGV[offset + 3], ARGV[offset + 4])
  count(ARGV[offset + 4], ARGV[offset + 5], ARGV[offset + 6])
  return 1
end
"""
"""What all scripts begin with."""

ACQUIRE = """
-- KEYS session, index; ARGV token, lease_ms, session_id, the commit that the router has a copy of. Returns
-- {1, whether the index has a session that is not there, whether it is marked, committed, record (empty if
-- there is none), parts...}, without record and parts if they are those of the copy, or {0}.
local fields = redis.call('HMGET', KEYS[1], 'holder', 'until', 'committed', 'unstored')
local same_router = fields[1] and router_of(fields[1]) == router_of(ARGV[1])
if fields[1] and not same_router and tonumber(fields[2]) > now_ms then return {0} end
redis.call('HINCRBY', KEYS[1], 'generation', 1)
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'until', now_ms + ARGV[2])
extend(KEYS[1], ARGV[2] * 4)
local expires_ms = redis.call('ZSCORE', KEYS[2], ARGV[3])
local lost = not fields[3] and expires_ms and tonumber(expires_ms) > now_ms
local answer = {1, lost and 1 or 0, fields[4] and 1 or 0, fields[3] or ''}
if fields[3] == ARGV[4] then return answer end
return stored(answer)
"""

READ = """
-- KEYS session; ARGV the commit that the router has a copy of. Returns {committed, record, parts...} as
-- `ACQUIRE`.
local committed = redis.call('HGET', KEYS[1], 'committed')
if committed == ARGV[1] then return {committed} end
return stored({committed or ''})
"""

RENEW = """
-- KEYS session; ARGV token, lease_ms. Returns whether the lease is current, or was lost with all data.
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder == ARGV[1] then
  redis.call('HSET', KEYS[1], 'until', now_ms + ARGV[2])
  extend(KEYS[1], ARGV[2] * 4)
  return 1
end
return 1 - redis.call('EXISTS', KEYS[1])
"""

RELEASE = """
-- KEYS session; ARGV token.
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then
  redis.call('HDEL', KEYS[1], 'holder', 'until')
  local left = redis.call('HMGET', KEYS[1], 'committed', 'unstored')
  if not left[1] and not left[2] then redis.call('DEL', KEYS[1]) end
end
return 1
"""

COMMIT = """
-- KEYS session, index, tokens, bytes; ARGV token, the commit that the record follows ('' for none), the most
-- bytes of all records that the index has (0: no limit), then as `put`. Returns 0 where the lease is not
-- current any more, 3 where the record grows and all would have more bytes, else as `put`. A failover may
-- lose the lease alone: then nobody has it, and nobody has committed or marked the session.
local fields = redis.call('HMGET', KEYS[1], 'holder', 'committed', 'unstored')
if fields[2] == ARGV[6] then return 1 end
if fields[1] ~= ARGV[1] and redis.call('EXISTS', KEYS[1]) == 1 then
  if fields[1] or fields[3] or (fields[2] or '') ~= ARGV[2] then return 0 end
end
local id, num_bytes, max_bytes = ARGV[8], tonumber(ARGV[10]), tonumber(ARGV[3])
if max_bytes > 0 and num_bytes > tonumber(redis.call('HGET', KEYS[4], id) or 0) then
  if sum_without(KEYS[4], KEYS[2], id) + num_bytes > max_bytes then return 3 end
end
return put(4)
"""

MARK = """
-- KEYS session; ARGV the commits that may be there, each between two bars ('' for any), the turn's token,
-- ttl_ms. Marks a session that lacks its last turn, unless it has gone on. The turn's lease ends, so that its
-- commit does not arrive late.
local fields = redis.call('HMGET', KEYS[1], 'holder', 'committed')
if fields[2] and ARGV[1] ~= '' then
  if not string.find(ARGV[1], '|' .. fields[2] .. '|', 1, true) then return 0 end
end
if fields[1] == ARGV[2] then redis.call('HDEL', KEYS[1], 'holder', 'until') end
redis.call('HSET', KEYS[1], 'unstored', 1)
extend(KEYS[1], tonumber(ARGV[3]))
return 1
"""

DELETE = """
-- KEYS session, index, tokens, bytes; ARGV marker, ttl_ms, session_id. Returns whether there was anything.
local fields = redis.call('HMGET', KEYS[1], 'holder', 'record', 'committed', 'generation', 'unstored')
if fields[3] == ARGV[1] then return 1 end
redis.call('ZREM', KEYS[2], ARGV[3])
count(ARGV[3], nil)
if not fields[1] and not fields[2] and not fields[5] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'generation', (fields[4] or 0) + 1, 'committed', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

LIST = """
-- KEYS index. Returns the ids of what has not expired.
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now_ms, '+inf')
"""

USAGE = """
-- KEYS index, tokens, bytes; ARGV an id to leave out. Returns {records, tokens, bytes, ms until the first
-- expires}.
local records = redis.call('ZCOUNT', KEYS[1], '(' .. now_ms, '+inf')
local expires_ms = redis.call('ZSCORE', KEYS[1], ARGV[1])
if expires_ms and tonumber(expires_ms) > now_ms then records = records - 1 end
local tokens, bytes = sum_without(KEYS[2], KEYS[1], ARGV[1]), sum_without(KEYS[3], KEYS[1], ARGV[1])
local first_ms = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now_ms, '+inf', 'LIMIT', 0, 2)) do
  if id ~= ARGV[1] and first_ms == 0 then first_ms = redis.call('ZSCORE', KEYS[1], id) - now_ms end
end
return {records, tokens, bytes, first_ms}
"""

REGISTER = """
-- KEYS routers, those that read parts; ARGV name, forget_ms. Returns how many others do not read parts: one
-- of an earlier release registers with KEYS[1] alone, maybe under the name of one that does.
for _, key in ipairs(KEYS) do redis.call('ZREMRANGEBYSCORE', key, '-inf', now_ms - ARGV[2]) end
local found, earlier = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'), 0
for index = 1, #found, 2 do
  local name, registered_ms = found[index], found[index + 1]
  if name ~= ARGV[1] and redis.call('ZSCORE', KEYS[2], name) ~= registered_ms then earlier = earlier + 1 end
end
for _, key in ipairs(KEYS) do redis.call('ZADD', key, now_ms, ARGV[1]) end
return earlier
"""

EXPIRED = """
-- KEYS index, tokens, bytes; ARGV how many. Returns ids of what has expired. The sums are added up again when
-- they are next needed: routers of earlier releases do not keep them.
redis.call('HDEL', KEYS[2], '')
redis.call('HDEL', KEYS[3], '')
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, ARGV[1])
"""

EXPIRE = """
-- KEYS session, index, tokens, bytes; ARGV session_id. Removes a session that has expired, unless a turn has
-- it.
local expires_ms = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not expires_ms or tonumber(expires_ms) > now_ms then return 0 end
local fields = redis.call('HMGET', KEYS[1], 'holder', 'until', 'record')
if fields[1] and tonumber(fields[2]) > now_ms then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
count(ARGV[1], nil)
if fields[3] then redis.call('DEL', KEYS[1]) end
return 1
"""
