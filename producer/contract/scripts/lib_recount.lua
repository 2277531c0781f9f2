-- Count a short queue again. The counters of waiting jobs are shared: another user may write any number there, and while
-- they claim a full queue, no job is accepted. What a long queue says is left to the audit.

local recount  -- the name used outside: a script may have 200 locals

do

local RECOUNT_EVERY_MS = 1000
local NAMES = { 'waiting_jobs', 'waiting_tokens', 'waiting_bytes' }
local ids  -- of all waiting jobs; nil once there are too many

local function add(id)
  ids[#ids + 1] = id
  if #ids > LIMITS.SLICE_JOBS then ids = nil end
end

local function add_lane(class, tenant)
  local entries = try('XRANGE', lane_key(class, tenant), '-', '+', 'COUNT', LIMITS.SLICE_JOBS + 1)
  for _, entry in ipairs(failed(entries) and {} or entries) do
    local parsed = ids and parse_entry(entry)
    if parsed then add(parsed.job) end
  end
end

local function add_class(class)
  local tenants = is_sound_class(class) and call('ZRANGE', PREFIX .. 'heads:' .. class, 0, LIMITS.SLICE_JOBS) or {}
  if #tenants > LIMITS.SLICE_JOBS then ids = nil end
  for _, tenant in ipairs(tenants) do
    if ids then add_lane(class, tenant) end
  end
end

-- A timer of a delayed job is at its own time at the latest: another user may have moved it.
local function keep_timer(job)
  local kind = job.retry and 'retry' or 'not_before'
  if job[kind] then call('ZADD', TIMERS, 'LT', job[kind], kind .. '|' .. job.id) end
end

-- Another user may have listed what does not wait there.
local function is_of(set, id)
  local job = load_job(id)
  local is_waiting = job and job.state == 'queued' and not job.entry
  if not is_waiting then
    call('ZREM', set, id)
  elseif set == DELAYED then
    keep_timer(job)
  end
  return is_waiting
end

local function add_set(set)
  for _, id in ipairs(call('ZRANGE', set, 0, LIMITS.SLICE_JOBS)) do
    if ids and is_of(set, id) then add(id) end
  end
  if call('ZCARD', set) > LIMITS.SLICE_JOBS then ids = nil end
end

local function sums_of(found)
  local jobs, tokens, bytes, is_counted = 0, 0, 0, {}
  for _, id in ipairs(found) do
    local job = not is_counted[id] and load_job(id)
    is_counted[id] = true
    if job and job.state == 'queued' then jobs, tokens, bytes = jobs + 1, tokens + job.cost, bytes + job.bytes end
  end
  return { jobs, tokens, bytes }
end

local function write(sums)
  local stated = call('HMGET', COUNTERS, unpack(NAMES))
  for i, name in ipairs(NAMES) do
    if tonumber(stated[i] or '0') ~= sums[i] then call('HSET', COUNTERS, name, sums[i]) end
  end
end

-- After `finish`, once a second.
function recount()
  local last = tonumber(call('HGET', CLOCK, 'counted') or '') or 0
  if NOW - last >= 0 and NOW - last < RECOUNT_EVERY_MS then return end
  call('HSET', CLOCK, 'counted', NOW)
  ids = {}
  add_set(DELAYED)
  add_set(SUSPECTS)
  if ids then add_class(RETURNED) end
  for class = 0, LIMITS.MAX_PRIORITY do
    if ids then add_class(class) end
  end
  if ids then write(sums_of(ids)) end
end

end
