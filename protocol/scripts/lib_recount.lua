-- Count a short queue again. The counters of waiting jobs are shared, so another user may write any number there, and
-- while they claim a full queue, no job is accepted. The counters of a long queue are left to the audit.

-- The limits of tenants may be lost, and the tenants still be parked.
local function check_limits(me)
  if not limits and call('EXISTS', PARKED) == 1 then
INCLUDE lib_limits
  end
  if limits then limits.check(me) end
end

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

-- The lanes of parked tenants are in no class.
local function add_parked()
  local tenants = try('ZRANGE', PARKED, 0, LIMITS.SLICE_JOBS)
  if failed(tenants) then return end
  if #tenants > LIMITS.SLICE_JOBS then ids = nil end
  for _, tenant in ipairs(tenants) do
    for _, lane in ipairs(ids and limits.lanes_of(tenant) or {}) do
      if ids then add_lane(lane.class, tenant) end
    end
  end
end

-- A timer of a delayed job is at its own time at the latest: another user may have moved it.
local function keep_timer(job)
  local kind = job.retry and 'retry' or 'not_before'
  if job[kind] then call('ZADD', TIMERS, 'LT', job[kind], kind .. '|' .. job.id) end
end

-- Another user may have listed jobs that do not wait there.
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
  local jobs, tokens, bytes, is_counted, held = 0, 0, 0, {}, {}
  for _, id in ipairs(found) do
    local job = not is_counted[id] and load_job(id)
    is_counted[id] = true
    if job and job.state == 'queued' then
      jobs, tokens, bytes = jobs + 1, tokens + job.cost, bytes + job.bytes
      local of_tenant = held[job.tenant] or { jobs = 0, tokens = 0, bytes = 0 }
      of_tenant.jobs, of_tenant.tokens = of_tenant.jobs + 1, of_tenant.tokens + job.cost
      of_tenant.bytes = of_tenant.bytes + job.bytes
      held[job.tenant] = of_tenant
    end
  end
  return { jobs, tokens, bytes }, held
end

-- Of some tenants, other ones each time: forget those that have had nothing for long. `held`: what each tenant has, if
-- the queue is short; wrong numbers of a tenant, written by another user, are corrected then.
local function look_at_tenants(held)
  if not is_type(TENANTS, 'hash') then call('DEL', TENANTS) end
  local is_crowded = call('HLEN', TENANTS) > LIMITS.TENANTS_KEPT
  local sample = as_map(call('HRANDFIELD', TENANTS, LIMITS.SLICE_JOBS, 'WITHVALUES'))
  for tenant in pairs(held or {}) do sample[tenant] = call('HGET', TENANTS, tenant) or '' end
  for tenant, text in pairs(sample) do
    local jobs, tokens, bytes, since = string.match(text, '^(%d+) (%d+) (%d+) (%d+)$')
    local wanted = held and (held[tenant] or { jobs = 0, tokens = 0, bytes = 0 })
    local is_idle = jobs == '0' and not (wanted and wanted.jobs > 0)
    if is_idle and (is_crowded or NOW - tonumber(since) > LIMITS.TENANT_KEPT_MS) then
      call('HDEL', TENANTS, tenant)
    elseif wanted and (tonumber(jobs) ~= wanted.jobs or tonumber(tokens) ~= wanted.tokens
        or tonumber(bytes) ~= wanted.bytes) then
      local found = waiting_of(tenant)
      found.jobs, found.tokens, found.bytes, found.is_changed = wanted.jobs, wanted.tokens, wanted.bytes, true
    end
  end
  write_waiting()
end

local function write(sums)
  local stated = call('HMGET', COUNTERS, unpack(NAMES))
  for i, name in ipairs(NAMES) do
    if tonumber(stated[i] or '0') ~= sums[i] then call('HSET', COUNTERS, name, sums[i]) end
  end
end

-- A job that is delayed since a future time: the server's clock has stepped back, and would delay it by that step. Its
-- original delay starts again now.
local function shorten_wait(id)
  local job = load_job(id)
  if not (job and job.state == 'queued' and job.retry and job.waits_since and job.waits_since > NOW) then return end
  local at = NOW + math.max(0, job.retry - job.waits_since)
  job.retry, job.waits_since = at, NOW
  save(job)
  call('ZADD', TIMERS, at, 'retry|' .. id)
end

-- A look at a flagged job, or the next slice of a batch that has begun to expire, would be late by that step: it is due
-- now.
local function hasten(member)
  local kind, id = string.match(member, '^(%l+)|(.+)$')
  if kind == 'stop' or kind == 'batch' and try('HGET', batch_key(id), 'expiring') == '1' then
    call('ZADD', TIMERS, 'LT', NOW, member)
  end
end

-- After a step back, look at some members of a set with each call, until all have been looked at.
local function scan_on(field, cursor, set, look_at)
  local page = try('ZSCAN', set, cursor, 'COUNT', LIMITS.SORTED_TIMERS)
  if failed(page) then return call('HDEL', CLOCK, field) end  -- no cursor: another user wrote it
  for i = 1, #page[2], 2 do look_at(page[2][i]) end
  if page[1] == '0' then call('HDEL', CLOCK, field) else call('HSET', CLOCK, field, page[1]) end
end

-- After `finish`, once a second.
function recount()
  local found = call('HMGET', CLOCK, 'counted', 'stepped', 'stepped_timers')
  local last, stepped, stepped_timers = tonumber(found[1] or '') or 0, found[2], found[3]
  if NOW - last >= 0 and NOW - last < RECOUNT_EVERY_MS then return end
  call('HSET', CLOCK, 'counted', NOW)
  if NOW < last then stepped, stepped_timers = '0', '0' end
  if stepped then scan_on('stepped', stepped, DELAYED, shorten_wait) end
  if stepped_timers then scan_on('stepped_timers', stepped_timers, TIMERS, hasten) end
  ids = {}
  add_set(DELAYED)
  add_set(SUSPECTS)
  if ids then add_class(RETURNED) end
  for class = 0, LIMITS.MAX_PRIORITY do
    if ids then add_class(class) end
  end
  if limits and ids then add_parked() end
  local sums, held
  if ids then
    sums, held = sums_of(ids)
    write(sums)
  end
  look_at_tenants(held)
  rows.write()
end

end
