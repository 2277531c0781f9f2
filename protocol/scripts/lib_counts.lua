-- Count what the counters should contain: one command per lane, and the leases of running jobs, exact at one instant.

-- The entry of a queued job, if it is on its lane and names the job.
local function entry_of(job)
  if not job.entry or not job.lane then return nil end
  local found = try('XRANGE', PREFIX .. 'lane:' .. job.lane, job.entry, job.entry)
  local parsed = not failed(found) and found[1] and parse_entry(found[1])
  return parsed and parsed.job == job.id and parsed or nil
end

-- Whether a timer makes a delayed job due at its own time. Another user may have moved it to a later one.
local function has_timer(job)
  for kind, at in pairs({ retry = job.retry, not_before = job.not_before }) do
    local score = tonumber(call('ZSCORE', TIMERS, kind .. '|' .. job.id) or '')
    if score and score <= at then return true end
  end
  return false
end

-- Numbers of a batch: its total, its ended jobs by state and in all, and those that it lists as open. A batch without a
-- total has expired: it counts as right.
local ENDS = { 'done', 'failed', 'cancelled', 'expired' }
local function batch_numbers(batch)
  local found = try('HMGET', batch_key(batch), 'total', unpack(ENDS))
  local open = try('ZCARD', members_key(batch))
  if failed(found) or failed(open) or not found[1] then return { total = 0, ended = 0, open = 0 } end
  local numbers = { total = tonumber(found[1]) or -1, open = open, ended = 0 }
  for i, state in ipairs(ENDS) do
    numbers[state] = whole(found[i + 1], LIMITS.MAX_NUMBER) or 0
    numbers.ended = numbers.ended + numbers[state]
  end
  return numbers
end

-- Every lane that is named in `depth`, in the heads of a class, or by the caller, which has seen its key.
local function lane_names(also)
  local depth, names = as_map(call('HGETALL', DEPTH)), {}
  for name in pairs(depth) do names[name] = depth[name] end
  for _, class in ipairs({ RETURNED, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 }) do
    local tenants = try('ZRANGE', PREFIX .. 'heads:' .. class, 0, -1)
    for _, tenant in ipairs(failed(tenants) and {} or tenants) do
      local name = class .. ':' .. tenant
      names[name] = names[name] or ''
    end
  end
  for _, name in ipairs(also) do names[name] = names[name] or '' end
  return names
end

-- A key of any other name is not a lane: no pull reads it.
local function length_of(name)
  local class, tenant = string.match(name, '^([^:]+):(.+)$')
  local is_class = class == RETURNED or tenant and string.find(class, '^%d$')
  if not tenant or not is_class or string.find(tenant, '[^a-z0-9_-]') then return 0 end
  local length = try('XLEN', PREFIX .. 'lane:' .. name)
  return failed(length) and 0 or length
end

local function held_jobs()
  local total = 0
  for _, incarnation in ipairs(call('ZRANGE', ALIVE, 0, -1)) do
    local num_held = try('HLEN', held_key(incarnation))
    total = total + (failed(num_held) and 0 or num_held)
  end
  return total
end

-- Changes with every state change: two counts with the same stamp have counted the same jobs.
local function stamp()
  local about = try('XINFO', 'STREAM', OUTBOX)
  return failed(about) and '0-0' or as_map(about)['last-generated-id']
end

-- Whether pulls find the lane, or will once its tenant leaves its limit. Jobs on an unlisted lane are never served.
local function is_listed(name)
  local class, tenant = string.match(name, '^([^:]+):(.+)$')
  if limits and limits.is_parked(tenant) then return true end
  for _, list in ipairs({ 'heads:', 'ready:' }) do
    local score = try('ZSCORE', PREFIX .. list .. class, tenant)
    if not score or failed(score) then return false end
  end
  return true
end

-- Count waiting and running jobs, lanes whose count in `depth` differs from their length, and unlisted lanes.
local function count_up(also)
  local waiting, wrong_lanes, unlisted = call('ZCARD', DELAYED) + call('ZCARD', SUSPECTS), {}, {}
  for name, text in pairs(lane_names(also)) do
    local length = length_of(name)
    waiting = waiting + length
    if length > 0 and not is_listed(name) then unlisted[#unlisted + 1] = name end
    if length ~= (tonumber(string.match(text, '^%d+') or '') or 0) then
      wrong_lanes[#wrong_lanes + 1] = { name, text, length }
    end
  end
  return waiting, held_jobs(), wrong_lanes, unlisted
end
