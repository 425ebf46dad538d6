-- Admission, heartbeat, top-up and settlement of one tenant's requests: one call each, all keys in the tenant's hash
-- slot. Time is Redis' own, in microseconds; leases are scored by their deadline in milliseconds. All numbers travel as
-- text: a Lua number on its way to a key or a reply would lose digits.
--
--   bucket    of a rate ('minute'): hash {used, at, limit}: `used` tokens or requests at time `at`, flowing out at
--             `limit` per minute. Of a budget ('day', 'month' of the calendar, UTC): hash {used, window}.
--             A bucket that has expired is an empty one.
--   leases    sorted set: attempt → deadline. Whoever is past the deadline no longer counts.
--   attempt   hash {blob, used, charged, at, skipped}: what settles the attempt if its worker does not; tokens known to
--             be used; tokens that the buckets were charged with, last at `at`, except those buckets in `skipped`.
--
-- Modes of limits: 'hard' refuses; 'soft' counts and lets through; 'shadow' lets through, and counts what it would have.

local MINUTE = 60000000
local DAY = 86400000000
local KEEP_MS = 86400000

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local now_ms = math.floor(now / 1000)

local function text(number)
  return string.format('%.17g', number)
end

-- The calendar day or month of a time, as a number: days since 1970, or months since year 0 (civil_from_days).
local function window(period, at)
  local days = math.floor(at / DAY)
  if period == 'day' then return days end
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local march = math.floor((5 * doy + 2) / 153)
  return (yoe + era * 400) * 12 + march + 3
end

-- Level of a bucket now, and the limit under which it was last charged.
local function level(key, period, limit)
  if period ~= 'minute' then
    local row = redis.call('HMGET', key, 'used', 'window')
    if not row[1] or row[2] ~= text(window(period, now)) then return 0, limit end
    return tonumber(row[1]), limit
  end
  local row = redis.call('HMGET', key, 'used', 'at', 'limit')
  if not row[1] then return 0, limit end
  local used, old = tonumber(row[1]), tonumber(row[3])
  used = math.max(0, used - math.max(0, now - tonumber(row[2])) * old / MINUTE)
  return used, old
end

-- Level of a bucket now, under `limit`. A lowered rate acts at once, but what was rightly used before it is no debt.
local function level_under(key, period, limit)
  local used, old = level(key, period, limit)
  if limit < old and used > limit then
    used = limit + math.max(0, used - old)
  end
  return used
end

local function charge(key, period, used, limit)
  if used <= 0 or (period == 'minute' and limit <= 0) then
    redis.call('DEL', key)
  elseif period == 'minute' then
    redis.call('HSET', key, 'used', text(used), 'at', text(now), 'limit', text(limit))
    redis.call('PEXPIRE', key, string.format('%.0f', math.ceil(used / limit * 60000) + 1000))
  else
    redis.call('HSET', key, 'used', text(used), 'window', text(window(period, now)))
    redis.call('PEXPIRE', key, period == 'day' and KEEP_MS or 31 * KEEP_MS)
  end
end

local function lease(key, attempt, ttl_ms)
  redis.call('ZADD', key, string.format('%.0f', now_ms + ttl_ms), attempt)
  redis.call('PEXPIRE', key, KEEP_MS)
end

local function remember(key, blob, used, charged, skipped)
  redis.call('HSET', key, 'blob', blob, 'used', used, 'charged', charged, 'at', text(now), 'skipped', skipped)
  redis.call('PEXPIRE', key, KEEP_MS)
end

local function has(skipped, key)
  return string.find(skipped, key .. '\n', 1, true) ~= nil
end

-- KEYS  epoch, attempt, leases of tenant, key and model, bucket…
-- ARGV  'hold', attempt, epoch, ttl_ms, blob, used, charged; of each lease: limit (-1 = any), mode;
--       of each bucket: period, limit, cost, mode
-- → 'stale' | 'held' | 'again' | 'refused', now, then how much of each was used before: leases, buckets
local function hold()
  if redis.call('GET', KEYS[1]) ~= ARGV[3] then return {'stale'} end
  local is_held = redis.call('EXISTS', KEYS[2]) == 1
  local is_refused = false
  local reply, found, skipped = {'again', text(now)}, {}, ''
  for i = 1, 3 do
    local limit = tonumber(ARGV[6 + 2 * i])
    local used = redis.call('ZCOUNT', KEYS[2 + i], '(' .. string.format('%.0f', now_ms), '+inf')
    reply[2 + i] = text(used)
    is_refused = is_refused or (limit >= 0 and used + 1 > limit and ARGV[7 + 2 * i] == 'hard')
  end
  for i = 1, #KEYS - 5 do
    local at = 10 + 4 * i
    local limit, cost = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    found[i] = level_under(KEYS[5 + i], ARGV[at], limit)
    reply[5 + i] = text(found[i])
    if found[i] + cost > limit then
      is_refused = is_refused or ARGV[at + 3] == 'hard'
      if ARGV[at + 3] == 'shadow' then skipped = skipped .. KEYS[5 + i] .. '\n' end
    end
  end
  if is_held then return reply end
  reply[1] = is_refused and 'refused' or 'held'
  if is_refused then return reply end
  for i = 3, 5 do
    redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', string.format('%.0f', now_ms - KEEP_MS))
    lease(KEYS[i], ARGV[2], tonumber(ARGV[4]))
  end
  for i = 1, #KEYS - 5 do
    local at = 10 + 4 * i
    if not has(skipped, KEYS[5 + i]) then
      charge(KEYS[5 + i], ARGV[at], found[i] + tonumber(ARGV[at + 2]), tonumber(ARGV[at + 1]))
    end
  end
  remember(KEYS[2], ARGV[5], ARGV[6], ARGV[7], skipped)
  return reply
end

-- Four KEYS and five ARGV per attempt, after the name and ttl_ms.
-- KEYS  attempt, leases of tenant, key and model
-- ARGV  'beat', ttl_ms; attempt, used, restore, blob, charged: with restore = 1 a record that Redis lost is made anew
-- → how many are alive
local function beat()
  local alive = 0
  for i = 0, #KEYS / 4 - 1 do
    local key, argument = KEYS[1 + 4 * i], 2 + 5 * i
    local is_known = redis.call('EXISTS', key) == 1
    if is_known or ARGV[argument + 3] == '1' then
      if is_known then
        redis.call('HSET', key, 'used', ARGV[argument + 2])
        redis.call('PEXPIRE', key, KEEP_MS)
      else
        remember(key, ARGV[argument + 4], ARGV[argument + 2], ARGV[argument + 5], '')
      end
      for j = 2, 4 do lease(KEYS[j + 4 * i], ARGV[argument + 1], tonumber(ARGV[2])) end
      alive = alive + 1
    end
  end
  return alive
end

-- More tokens for an attempt that runs on. If a limit refuses, only what was really used beyond the reservation is
-- charged: a debt, which flows out or is left to the budget.
-- KEYS  attempt, bucket of tokens…
-- ARGV  'topup', used, more; of each bucket: period, limit, mode
-- → 'granted' | 'debt' | 'gone', tokens charged by now
local function topup()
  local row = redis.call('HMGET', KEYS[1], 'charged', 'skipped')
  if not row[1] then return {'gone', '0'} end
  local charged, more, answer = tonumber(row[1]), tonumber(ARGV[3]), 'granted'
  local found = {}
  for i = 2, #KEYS do
    local at = 3 * i - 2
    found[i] = level_under(KEYS[i], ARGV[at], tonumber(ARGV[at + 1]))
    if ARGV[at + 2] == 'hard' and found[i] + more > tonumber(ARGV[at + 1]) then answer = 'debt' end
  end
  if answer == 'debt' then more = math.max(0, tonumber(ARGV[2]) - charged) end
  for i = 2, #KEYS do
    local at = 3 * i - 2
    if more > 0 and not has(row[2], KEYS[i]) then charge(KEYS[i], ARGV[at], found[i] + more, tonumber(ARGV[at + 1])) end
  end
  redis.call('HSET', KEYS[1], 'used', ARGV[2], 'charged', text(charged + more), 'at', text(now))
  return {answer, text(charged + more)}
end

-- KEYS  attempt, leases of tenant, key and model, stream of usage, bucket of tokens…
-- ARGV  'settle', attempt, how, tokens used, usage entry ('' = none); of each bucket: period, limit
--       how = 'end': the worker says so. 'expire': only if the lease has run out; a later 'end' corrects it.
-- What was reserved from a budget whose day or month is over stays there; what is due on top is charged to the new one.
-- → 'settled' | 'alive'
local function settle()
  if ARGV[3] == 'expire' then
    local deadline = redis.call('ZSCORE', KEYS[2], ARGV[2])
    if not deadline or tonumber(deadline) > now_ms then return 'alive' end
  end
  local row = redis.call('HMGET', KEYS[1], 'charged', 'at', 'skipped')
  if row[1] then
    local delta = tonumber(ARGV[4]) - tonumber(row[1])
    for i = 1, #KEYS - 5 do
      local key, period = KEYS[5 + i], ARGV[4 + 2 * i]
      local is_over = period ~= 'minute' and window(period, tonumber(row[2])) ~= window(period, now)
      if delta ~= 0 and not has(row[3], key) and not (delta < 0 and is_over) then
        local used, limit = level(key, period, tonumber(ARGV[5 + 2 * i]))
        charge(key, period, used + delta, limit)
      end
    end
  end
  if ARGV[3] == 'end' then
    redis.call('DEL', KEYS[1])
  elseif row[1] then
    redis.call('HSET', KEYS[1], 'charged', ARGV[4], 'at', text(now))
  end
  for i = 2, 4 do redis.call('ZREM', KEYS[i], ARGV[2]) end
  if ARGV[5] ~= '' then redis.call('XADD', KEYS[5], '*', 'entry', ARGV[5]) end
  return 'settled'
end

if ARGV[1] == 'hold' then return hold() end
if ARGV[1] == 'beat' then return beat() end
if ARGV[1] == 'topup' then return topup() end
return settle()
