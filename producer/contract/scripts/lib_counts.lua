-- What the counters should say, counted from what is there: a command for each lane, and the leases of what runs, so
-- that it is exact at one instant.

-- The entry of a queued job, where it is on its lane and names it.
local function entry_of(job)
  if not job.entry or not job.lane then return nil end
  local found = try('XRANGE', PREFIX .. 'lane:' .. job.lane, job.entry, job.entry)
  local parsed = not failed(found) and found[1] and parse_entry(found[1])
  return parsed and parsed.job == job.id and parsed or nil
end

-- Every lane that something speaks of: `depth`, the heads of a class, or the caller, who has seen its key.
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

local function length_of(name)
  local length = try('XLEN', PREFIX .. 'lane:' .. name)
  return failed(length) and 0 or length
end

-- What is left in an owner's list without its lease is not its own: its next beat takes it off.
local function num_owned(incarnation, ids)
  local total = 0
  for from = 1, #ids, 1000 do
    for _, packed in ipairs(call('HMGET', LEASES, unpack(ids, from, math.min(from + 999, #ids)))) do
      if packed and cmsgpack.unpack(packed)[OWNER] == incarnation then total = total + 1 end
    end
  end
  return total
end

local function held_jobs()
  local total = 0
  for _, incarnation in ipairs(call('ZRANGE', ALIVE, 0, -1)) do
    local ids = try('HKEYS', held_key(incarnation))
    total = total + (failed(ids) and 0 or num_owned(incarnation, ids))
  end
  return total
end

-- Changes with every change of a job's state: two counts with the same stamp were made of the same jobs.
local function stamp()
  local about = try('XINFO', 'STREAM', OUTBOX)
  return failed(about) and '0-0' or as_map(about)['last-generated-id']
end

-- Whether pulls find the lane: what waits on another is never served.
local function is_listed(name)
  local class, tenant = string.match(name, '^([^:]+):(.+)$')
  for _, list in ipairs({ 'heads:', 'ready:' }) do
    local score = try('ZSCORE', PREFIX .. list .. class, tenant)
    if not score or failed(score) then return false end
  end
  return true
end

-- Waiting and running jobs that there are, each lane whose number in `depth` differs from its length, and each that
-- waits and is not listed.
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
