-- Admission, heartbeat and settlement of one tenant's requests: one call each, all keys in the tenant's hash slot.
-- Time is Redis' own, in microseconds; leases are scored by their deadline in milliseconds. All numbers travel as text:
-- a Lua number on its way to a key or a reply would lose digits.
--
--   bucket    hash {used, at, limit}: `used` tokens or requests at time `at`, flowing out at `limit` per minute.
--             A bucket that has expired is an empty one.
--   leases    sorted set: attempt → deadline. Whoever is past the deadline no longer counts.
--   attempt   hash {blob, used, charged}: what settles the attempt if its worker does not; tokens known to be used;
--             tokens that the buckets have been charged with.

local MINUTE = 60000000
local KEEP_MS = 86400000

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local now_ms = math.floor(now / 1000)

local function text(number)
  return string.format('%.17g', number)
end

-- Level of a bucket now, and the limit under which it was last charged.
local function level(key, limit)
  local row = redis.call('HMGET', key, 'used', 'at', 'limit')
  if not row[1] then return 0, limit end
  local used, old = tonumber(row[1]), tonumber(row[3])
  used = math.max(0, used - math.max(0, now - tonumber(row[2])) * old / MINUTE)
  return used, old
end

-- Level of a bucket now, under `limit`. A lowered limit acts at once, but what was rightly used before it is no debt.
local function level_under(key, limit)
  local used, old = level(key, limit)
  if limit < old and used > limit then
    used = limit + math.max(0, used - old)
  end
  return used
end

local function charge(key, used, limit)
  if used <= 0 or limit <= 0 then
    redis.call('DEL', key)
    return
  end
  redis.call('HSET', key, 'used', text(used), 'at', text(now), 'limit', text(limit))
  redis.call('PEXPIRE', key, string.format('%.0f', math.ceil(used / limit * 60000) + 1000))
end

local function lease(key, attempt, ttl_ms)
  redis.call('ZADD', key, string.format('%.0f', now_ms + ttl_ms), attempt)
  redis.call('PEXPIRE', key, KEEP_MS)
end

local function remember(key, blob, used, charged)
  redis.call('HSET', key, 'blob', blob, 'used', used, 'charged', charged)
  redis.call('PEXPIRE', key, KEEP_MS)
end

-- KEYS  epoch, attempt, tenant's leases, key's leases, bucket…
-- ARGV  'hold', attempt, epoch, ttl_ms, blob, used, charged, tenant's leases allowed, key's (-1 = any), limit, cost…
-- → 'stale' | 'held' | 'refused', now, then what is used: tenant's leases, key's leases, each bucket
local function hold()
  if redis.call('GET', KEYS[1]) ~= ARGV[3] then return {'stale'} end
  local is_held = redis.call('EXISTS', KEYS[2]) == 1
  local is_refused = false
  local found = {}
  for i = 1, 2 do
    local used, limit = redis.call('ZCOUNT', KEYS[2 + i], '(' .. string.format('%.0f', now_ms), '+inf'), tonumber(ARGV[7 + i])
    found[i] = used
    is_refused = is_refused or (limit >= 0 and used + 1 > limit)
  end
  for i = 1, #KEYS - 4 do
    local limit, cost = tonumber(ARGV[8 + 2 * i]), tonumber(ARGV[9 + 2 * i])
    local used = level_under(KEYS[4 + i], limit)
    found[2 + i] = used
    is_refused = is_refused or used + cost > limit
  end
  local reply = {is_held and 'held' or is_refused and 'refused' or 'held', text(now)}
  if not is_held and not is_refused then
    for i = 1, 2 do
      redis.call('ZREMRANGEBYSCORE', KEYS[2 + i], '-inf', string.format('%.0f', now_ms - KEEP_MS))
      lease(KEYS[2 + i], ARGV[2], tonumber(ARGV[4]))
      found[i] = found[i] + 1
    end
    for i = 1, #KEYS - 4 do
      found[2 + i] = found[2 + i] + tonumber(ARGV[9 + 2 * i])
      charge(KEYS[4 + i], found[2 + i], tonumber(ARGV[8 + 2 * i]))
    end
    remember(KEYS[2], ARGV[5], ARGV[6], ARGV[7])
  end
  for i = 1, #found do reply[2 + i] = text(found[i]) end
  return reply
end

-- Three KEYS and five ARGV per attempt, after the name and ttl_ms.
-- KEYS  attempt, tenant's leases, key's leases
-- ARGV  'beat', ttl_ms; attempt, used, restore, blob, charged: with restore = 1 a record that Redis lost is made anew
-- → how many are alive
local function beat()
  local alive = 0
  for i = 0, #KEYS / 3 - 1 do
    local key, argument = KEYS[1 + 3 * i], 2 + 5 * i
    local is_known = redis.call('EXISTS', key) == 1
    if is_known or ARGV[argument + 3] == '1' then
      if is_known then
        redis.call('HSET', key, 'used', ARGV[argument + 2])
        redis.call('PEXPIRE', key, KEEP_MS)
      else
        remember(key, ARGV[argument + 4], ARGV[argument + 2], ARGV[argument + 5])
      end
      lease(KEYS[2 + 3 * i], ARGV[argument + 1], tonumber(ARGV[2]))
      lease(KEYS[3 + 3 * i], ARGV[argument + 1], tonumber(ARGV[2]))
      alive = alive + 1
    end
  end
  return alive
end

-- KEYS  attempt, tenant's leases, key's leases, stream of usage, bucket of tokens…
-- ARGV  'settle', attempt, how, tokens used, usage entry ('' = none), limit…
--       how = 'end': the worker says so. 'expire': only if the lease has run out; a later 'end' corrects it.
-- → 'settled' | 'alive'
local function settle()
  if ARGV[3] == 'expire' then
    local deadline = redis.call('ZSCORE', KEYS[2], ARGV[2])
    if not deadline or tonumber(deadline) > now_ms then return 'alive' end
  end
  local charged = redis.call('HGET', KEYS[1], 'charged')
  if charged then
    local delta = tonumber(ARGV[4]) - tonumber(charged)
    for i = 1, #KEYS - 4 do
      local used, limit = level(KEYS[4 + i], tonumber(ARGV[5 + i]))
      if delta ~= 0 then charge(KEYS[4 + i], used + delta, limit) end
    end
  end
  if ARGV[3] == 'end' then
    redis.call('DEL', KEYS[1])
  elseif charged then
    redis.call('HSET', KEYS[1], 'charged', ARGV[4])
  end
  redis.call('ZREM', KEYS[2], ARGV[2])
  redis.call('ZREM', KEYS[3], ARGV[2])
  if ARGV[5] ~= '' then redis.call('XADD', KEYS[4], '*', 'entry', ARGV[5]) end
  return 'settled'
end

if ARGV[1] == 'hold' then return hold() end
if ARGV[1] == 'beat' then return beat() end
return settle()
