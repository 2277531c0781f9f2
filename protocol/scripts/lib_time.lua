-- The settings of a queue, its clock, and when something in it is due. All that a pull of an empty queue needs.

local TIMERS, ALIVE = PREFIX .. 'timers', PREFIX .. 'alive'
local SUSPECTS, NOTIFICATIONS = PREFIX .. 'suspects', PREFIX .. 'bell'
-- Tenants at their limits, by when they may start a job.
local PARKED = PREFIX .. 'parked'
local RETURNED = 'returned'

local CLASSES = { returned = RETURNED, [0] = '0', '1', '2', '3', '4', '5', '6', '7', '8', '9' }
local function heads_key(class) return PREFIX .. 'heads:' .. CLASSES[class] end
local function ready_key(class) return PREFIX .. 'ready:' .. CLASSES[class] end

-- A whole number from 0 to `most`, or nil: also for text, fractions, infinity and nan.
local function whole(text, most)
  local number = tonumber(text or '')
  if number and number >= 0 and number <= most and number % 1 == 0 then return number end
end

local function as_map(flat)
  local map = {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

local SETTINGS = as_map(call('HGETALL', KEYS[1]))

-- The least value of settings that are not from 0. Times to live must be over 0: SET refuses PX 0 in the middle of a
-- script.
local LEAST = {
  channel_ttl_ms = 1, result_ttl_ms = 1, idempotency_ttl_ms = 1, max_failures = 1, partitions = 1,
  tenant_share_percent = 1,
  bytes_per_token = 0.01, test_clock_offset_ms = -LIMITS.MAX_NUMBER,
}
local HAS_FRACTION = {
  bytes_per_token = true, ms_per_token = true, ttft_target_ms = true, tpot_target_ms = true,
}

-- The value of a setting that is a number; nil if it is out of its range.
local function setting_in_range(name, text)
  local value = tonumber(text)
  if not value then return nil end
  -- Not a number compares as false, so each bound is stated as what must hold.
  local is_in_range = value >= (LEAST[name] or 0) and value <= LIMITS.MAX_NUMBER
  return is_in_range and (HAS_FRACTION[name] or value % 1 == 0) and value or nil
end

local function setting(name, default)
  return setting_in_range(name, SETTINGS[name]) or default
end

-- The server's clock in milliseconds. Two settings are for tests: `test_clock_ms` stops the clock of the queue,
-- `test_clock_offset_ms` shifts it.
local function server_clock()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local NOW = setting('test_clock_ms') or server_clock() + setting('test_clock_offset_ms', 0)
-- A time of `ms` from now.
local function from_now(ms) return ms and math.min(NOW + ms, LIMITS.MAX_NUMBER) end
-- The time by which heartbeats expire. Only heartbeats advance it, each by what has passed since the one before, but at
-- most by `most`. So a step of the server's clock, or a failover to another clock, neither kills workers nor delays a
-- takeover for long. Before the first heartbeat it is the server's clock.
local CLOCK = PREFIX .. 'clock'
local function beat_time(most)
  local found = call('HMGET', CLOCK, 'at', 'read', 'most')
  local at, read = tonumber(found[1] or ''), tonumber(found[2] or '')
  if not at or not read then return NOW end
  return at + math.max(0, math.min(NOW - read, most or tonumber(found[3]) or 0))
end

-- A time that a sorted set has as a score; nil if none, or if another program wrote what is no time.
local function time_in(score)
  local at = tonumber(score or '')
  return at and at <= LIMITS.MAX_NUMBER and at or nil
end

local function earlier(a, b) return a and b and math.min(a, b) or a or b end

-- When the first timer is due, or the first parked tenant may start a job; nil if neither is known. Due timers that one
-- call did not fire have scores below 0.
local function next_timer()
  local at = time_in(call('ZRANGE', TIMERS, '0', '0', 'WITHSCORES')[2])
  local first = SETTINGS.limited and try('ZRANGE', PARKED, '0', '0', 'WITHSCORES')
  if first and not failed(first) then at = earlier(at, time_in(first[2])) end
  return at and at < 0 and NOW or at
end

-- When the next of the heartbeats that have not expired does, of workers other than `me`; nil if there is none. The
-- clock of heartbeats may stand still until the next one.
local function next_expiry(me, now)
  local beating = call('ZRANGEBYSCORE', ALIVE, '(' .. text_of(now), '+inf', 'WITHSCORES', 'LIMIT', '0', '2')
  local expiry = time_in(beating[beating[1] == me and 4 or 2])
  return expiry and NOW + math.max(expiry - now, LIMITS.LOOK_AGAIN_MS)
end
