-- Admission, heartbeat, top-up and settlement of one tenant's requests: one call each, all keys in the tenant's hash
-- slot. Time is Redis' own, in microseconds; leases are scored by their deadline in milliseconds. All numbers travel as
-- text: a Lua number on its way to a key or a reply would lose digits.
--
--   bucket    of a rate ('minute'): hash {used, at, limit}: `used` tokens or requests at time `at`, flowing out at
--             `limit` per minute. Of a budget ('day', 'month' of the calendar, UTC): hash {used, window, counted}; it
--             was counted from the ledger at that epoch. A bucket that has expired is an empty one.
--   leases    sorted set: attempt → deadline. Whoever is past the deadline no longer counts.
--   attempt   hash {blob, used, charged, at, skipped}: what settles the attempt if its worker does not; tokens known to
--             be used; tokens that the buckets were charged with, last at `at`, except those buckets in `skipped`.
--
-- Modes of limits: 'hard' refuses; 'soft' counts and lets through; 'shadow' lets through, and counts what it would have.

local MINUTE = 60000000
local DAY = 86400000000
local MINUTE_MS = 60000
local DAY_MS = 86400000
local KEEP_MS = DAY_MS

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

-- The key lives `ms` at least. Asking is cheaper than setting, which also goes to Redis' log: so it is set to more.
local function keep(key, ms, more_ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, string.format('%.0f', ms + more_ms)) end
end

local function charge(key, period, used, limit)
  if used <= 0 or (period == 'minute' and limit <= 0) then
    redis.call('DEL', key)
  elseif period == 'minute' then
    redis.call('HSET', key, 'used', text(used), 'at', text(now), 'limit', text(limit))
    keep(key, math.ceil(used / limit * MINUTE_MS) + 1000, MINUTE_MS)
  else
    redis.call('HSET', key, 'used', text(used), 'window', text(window(period, now)))
    keep(key, period == 'day' and DAY_MS or 31 * DAY_MS, DAY_MS)
  end
end

local function lease(key, attempt, ttl_ms)
  redis.call('ZADD', key, string.format('%.0f', now_ms + ttl_ms), attempt)
  keep(key, KEEP_MS, KEEP_MS)
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
  local reply, leased, found, skipped = {'again', text(now)}, {}, {}, ''
  for i = 1, 3 do
    local limit = tonumber(ARGV[6 + 2 * i])
    leased[i] = redis.call('ZCOUNT', KEYS[2 + i], '(' .. string.format('%.0f', now_ms), '+inf')
    local used = leased[i]
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
  for i = 1, 3 do
    if leased[i] == 0 then -- what has been dead for a day, and nobody settled, was lost elsewhere
      redis.call('ZREMRANGEBYSCORE', KEYS[2 + i], '-inf', string.format('%.0f', now_ms - KEEP_MS))
    end
    lease(KEYS[2 + i], ARGV[2], tonumber(ARGV[4]))
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

-- Four KEYS and four ARGV per attempt, after the name and ttl_ms.
-- KEYS  attempt, leases of tenant, key and model
-- ARGV  'beat', ttl_ms; attempt, used, restore, blob: with restore = 1 a record that Redis lost is made anew, charged
--       with nothing, for what the hold had charged was lost with it
-- → how many are alive
local function beat()
  local alive = 0
  for i = 0, #KEYS / 4 - 1 do
    local key, argument = KEYS[1 + 4 * i], 2 + 4 * i
    local is_known = redis.call('EXISTS', key) == 1
    if is_known or ARGV[argument + 3] == '1' then
      if is_known then
        redis.call('HSET', key, 'used', ARGV[argument + 2])
        redis.call('PEXPIRE', key, KEEP_MS)
      else
        remember(key, ARGV[argument + 4], ARGV[argument + 2], '0', '')
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
-- → 'settled' | 'alive' | 'unknown': nothing was charged or given back, because Redis has forgotten the attempt (or it
--   was settled before): its budgets must be counted again
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
  return row[1] and 'settled' or 'unknown'
end

-- Budgets as they are: what the ledger says, what waits to be written there, what running attempts are charged with.
-- KEYS  stream of usage, who reads it for the ledger, leases of the tenant, bucket of tokens…
-- ARGV  'recount', the last entry of the stream and the reader when the ledger was read, epoch, prefix of attempts,
--       names of models that stand for others (JSON), then day and month: as the windows count them, as text;
--       of each bucket: period, owner ('tenant', 'model:<name>', a key), tokens up to that entry
-- → 'counted' | 'again': the ledger is written meanwhile, or the day is over
local function recount()
  if (redis.call('GET', KEYS[2]) or '') ~= ARGV[3] then return 'again' end
  if text(window('day', now)) ~= ARGV[7] or text(window('month', now)) ~= ARGV[9] then return 'again' end
  local used, names = {}, cjson.decode(ARGV[6])
  for i = 1, #KEYS - 3 do used[i] = tonumber(ARGV[10 + 3 * i]) end
  for _, row in ipairs(redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+')) do
    local entry = cjson.decode(row[2][2])
    local tokens = (entry.prompt_tokens or 0) + (entry.completion_tokens or 0)
    local model = 'model:' .. string.match(names[entry.model] or entry.model, '^[^@]*')
    for i = 1, #KEYS - 3 do
      local owner, begin = ARGV[9 + 3 * i], ARGV[8 + 3 * i] == 'day' and ARGV[8] or ARGV[10]
      local is_owner = owner == 'tenant' or owner == entry.key_id or owner == model
      if is_owner and string.sub(entry.created_at, 1, #begin) == begin then used[i] = used[i] + tokens end
    end
  end
  for _, attempt in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
    local row = redis.call('HMGET', ARGV[5] .. attempt, 'blob', 'charged', 'at', 'skipped')
    for _, bucket in ipairs(row[1] and cjson.decode(row[1])[3] or {}) do
      for i = 1, #KEYS - 3 do
        local is_now = window(ARGV[8 + 3 * i], tonumber(row[3])) == window(ARGV[8 + 3 * i], now)
        if bucket[1] == KEYS[3 + i] and is_now and not has(row[4], KEYS[3 + i]) then
          used[i] = used[i] + tonumber(row[2])
        end
      end
    end
  end
  for i = 1, #KEYS - 3 do
    charge(KEYS[3 + i], ARGV[8 + 3 * i], math.max(used[i], 0.5), 0)
    redis.call('HSET', KEYS[3 + i], 'used', text(used[i]), 'counted', ARGV[4])
  end
  return 'counted'
end

if ARGV[1] == 'recount' then return recount() end
if ARGV[1] == 'hold' then return hold() end
if ARGV[1] == 'beat' then return beat() end
if ARGV[1] == 'topup' then return topup() end
return settle()
