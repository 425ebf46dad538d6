"""Lua of conversations.py: what must be one step in Redis. All keys of a call lie in one hash slot, `{t:<tenant>}`.

`resp:<id>`        hash  response (JSON), input (JSON list), output (JSON list), previous, conversation, before
`conv:<id>`        hash  created_at, metadata (JSON), seq (of the newest item), turn (token), turn_until (ms)
`conv:<id>:order`  zset  item id → seq
`conv:<id>:items`  hash  item id → JSON

Scripts with a time to live (ARGV 1) get the tenant's epoch too (ARGV 2), as of which it holds. If the epoch has moved
since, the tenant may have come to keep less: writers answer 'stale' and write nothing, readers renew no time to live.

A turn holds the conversation by `turn`/`turn_until` inside the hash. The hold only makes losers fail early; that no
turn is lost or mixed is ensured by COMMIT, which compares `seq` with what the turn has read.
"""

CLOCK = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function busy(conv)
  local held = redis.call('HMGET', conv, 'turn', 'turn_until')
  return held[1] and tonumber(held[2]) > now and held[1]
end
local function is_stale()
  return redis.call('GET', string.match(KEYS[1], '^{.-}:') .. 'epoch') ~= ARGV[2]
end
local function renew(...)
  if is_stale() then return end
  for _, key in ipairs({...}) do redis.call('EXPIRE', key, ARGV[1]) end
end
local function touch(conv)
  renew(conv, conv .. ':order', conv .. ':items')
end
local function append(conv, first)
  local seq = tonumber(redis.call('HGET', conv, 'seq'))
  for i = first, #ARGV, 2 do
    seq = seq + 1
    redis.call('ZADD', conv .. ':order', seq, ARGV[i])
    redis.call('HSET', conv .. ':items', ARGV[i], ARGV[i + 1])
  end
  redis.call('HSET', conv, 'seq', string.format('%d', seq))
end
local function hold(conv, lease)
  redis.call('HSET', conv, 'turn_until', string.format('%d', now + lease))
end
-- items of seq ≤ last, newest first, until max bytes are read; true if some are left
local function collect(conv, last, bytes, max, out)
  local from = last
  while true do
    local ids = redis.call('ZREVRANGEBYSCORE', conv .. ':order', from, '-inf', 'LIMIT', 0, 64)
    if #ids == 0 then return false end
    for _, text in ipairs(redis.call('HMGET', conv .. ':items', unpack(ids))) do
      if text then
        if bytes + #text > max then return true end
        bytes = bytes + #text
        out[#out + 1] = text
      end
    end
    from = '(' .. redis.call('ZSCORE', conv .. ':order', ids[#ids])
  end
end
"""

CREATE = (
    CLOCK
    + """
-- KEYS conv; ARGV ttl, epoch, created_at, metadata, [item id, item]…
if is_stale() then return 'stale' end
redis.call('HSET', KEYS[1], 'created_at', ARGV[3], 'metadata', ARGV[4], 'seq', 0)
append(KEYS[1], 5)
touch(KEYS[1])
return 'ok'
"""
)

APPEND = (
    CLOCK
    + """
-- KEYS conv; ARGV ttl, epoch, [item id, item]…
if is_stale() then return 'stale' end
if redis.call('EXISTS', KEYS[1]) == 0 then return 'missing' end
if busy(KEYS[1]) then return 'busy' end
append(KEYS[1], 3)
touch(KEYS[1])
return 'ok'
"""
)

UPDATE = (
    CLOCK
    + """
-- KEYS conv; ARGV ttl, epoch, metadata → when it was created, 'missing' or 'stale'
if is_stale() then return 'stale' end
if redis.call('EXISTS', KEYS[1]) == 0 then return 'missing' end
redis.call('HSET', KEYS[1], 'metadata', ARGV[3])
touch(KEYS[1])
return redis.call('HGET', KEYS[1], 'created_at')
"""
)

DELETE = (
    CLOCK
    + """
-- KEYS conv
if redis.call('EXISTS', KEYS[1]) == 0 then return 'missing' end
if busy(KEYS[1]) then return 'busy' end
redis.call('DEL', KEYS[1], KEYS[1] .. ':order', KEYS[1] .. ':items')
return 'ok'
"""
)

DELETE_ITEM = (
    CLOCK
    + """
-- KEYS conv; ARGV item id → {outcome, created_at, metadata}
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing'} end
if busy(KEYS[1]) then return {'busy'} end
if redis.call('ZREM', KEYS[1] .. ':order', ARGV[1]) == 0 then return {'no_item'} end
redis.call('HDEL', KEYS[1] .. ':items', ARGV[1])
local row = redis.call('HMGET', KEYS[1], 'created_at', 'metadata')
return {'ok', row[1], row[2]}
"""
)

PAGE = (
    CLOCK
    + """
-- KEYS conv; ARGV ttl, epoch, limit, 'asc' or 'desc', after (or '') → {outcome, items, 1 if there are more}
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing'} end
touch(KEYS[1])
local order = KEYS[1] .. ':order'
local start = false
if ARGV[5] ~= '' then
  start = redis.call('ZSCORE', order, ARGV[5])
  if not start then return {'no_item'} end
end
local ids
local count = tonumber(ARGV[3]) + 1
if ARGV[4] == 'asc' then
  ids = redis.call('ZRANGEBYSCORE', order, start and '(' .. start or '-inf', '+inf', 'LIMIT', 0, count)
else
  ids = redis.call('ZREVRANGEBYSCORE', order, start and '(' .. start or '+inf', '-inf', 'LIMIT', 0, count)
end
local more = 0
if #ids == count then
  more = 1
  ids[count] = nil
end
if #ids == 0 then return {'ok', {}, 0} end
return {'ok', redis.call('HMGET', KEYS[1] .. ':items', unpack(ids)), more}
"""
)

BEGIN = (
    CLOCK
    + """
-- KEYS conv; ARGV ttl, epoch, token, lease ms, max bytes → {outcome, seq, items newest first, 1 if some were left out}
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing'} end
local holder = busy(KEYS[1])
if holder and holder ~= ARGV[3] then return {'busy'} end
redis.call('HSET', KEYS[1], 'turn', ARGV[3])
hold(KEYS[1], ARGV[4])
touch(KEYS[1])
local items = {}
local seq = redis.call('HGET', KEYS[1], 'seq')
local cut = collect(KEYS[1], '+inf', 0, tonumber(ARGV[5]), items)
return {'ok', tonumber(seq), items, cut and 1 or 0}
"""
)

HOLD = (
    CLOCK
    + """
-- KEYS conv; ARGV token, lease ms (0 = let go)
if redis.call('HGET', KEYS[1], 'turn') ~= ARGV[1] then return 'lost' end
if ARGV[2] == '0' then
  redis.call('HDEL', KEYS[1], 'turn', 'turn_until')
else
  hold(KEYS[1], ARGV[2])
end
return 'ok'
"""
)

COMMIT = (
    CLOCK
    + """
-- KEYS resp, [conv]; ARGV ttl, epoch, token, seq that was read, n fields (0 = don't keep the response),
-- [field, value]×n, [item id, item]…
if is_stale() then return 'stale' end
local fields = {}
local n = tonumber(ARGV[5])
for i = 6, 5 + 2 * n do fields[#fields + 1] = ARGV[i] end
if KEYS[2] then
  local row = redis.call('HMGET', KEYS[2], 'seq', 'turn')
  if not row[1] then return 'missing' end
  if redis.call('HEXISTS', KEYS[2] .. ':items', ARGV[6 + 2 * n]) == 1 then return 'ok' end  -- a repetition
  local holder = busy(KEYS[2])
  if row[1] ~= ARGV[4] or (holder and holder ~= ARGV[3]) then return 'lost' end
  append(KEYS[2], 6 + 2 * n)
  redis.call('HDEL', KEYS[2], 'turn', 'turn_until')
  touch(KEYS[2])
end
if n > 0 then
  redis.call('HSET', KEYS[1], unpack(fields))
  renew(KEYS[1])
end
return 'ok'
"""
)

CHAIN = (
    CLOCK
    + """
-- KEYS resp; ARGV ttl, epoch, tenant's key prefix, max bytes, max turns
-- → {'ok', JSON lists newest first, 1 if some were left out, conversation items newest first} or {'missing', key}
local key, bytes, max, lists = KEYS[1], 0, tonumber(ARGV[4]), {}
local turns = tonumber(ARGV[5])
while true do
  local row = redis.call('HMGET', key, 'input', 'output', 'previous', 'conversation', 'before')
  if not row[1] then return {'missing', key} end
  renew(key)
  bytes = bytes + #row[1] + #row[2]
  if bytes > max or #lists >= 2 * turns then return {'ok', lists, 1, {}} end
  lists[#lists + 1] = row[2]
  lists[#lists + 1] = row[1]
  if row[4] ~= '' then
    local conv = ARGV[3] .. 'conv:' .. row[4]
    if redis.call('EXISTS', conv) == 0 then return {'missing', conv} end
    touch(conv)
    local items = {}
    local cut = collect(conv, row[5], bytes, max, items)
    return {'ok', lists, cut and 1 or 0, items}
  end
  if row[3] == '' then return {'ok', lists, 0, {}} end
  key = ARGV[3] .. 'resp:' .. row[3]
end
"""
)
