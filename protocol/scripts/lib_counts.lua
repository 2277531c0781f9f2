-- Count what the counters should contain: a few commands per lane, and the leases of running jobs.

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

-- The texts in `depth` of every lane that is named there, in the heads of a class, or by the caller, which has seen its
-- key; nil if one call would count too many.
local function all_lanes(also)
  local num_named = call('HLEN', DEPTH)
  for class in pairs(CLASSES) do
    local num_heads = try('ZCARD', heads_key(class))
    num_named = num_named + (failed(num_heads) and 0 or num_heads)
  end
  -- Most lanes are named in both places.
  if num_named > 2 * LIMITS.LANES_PER_COUNT then return nil end
  local texts = as_map(call('HGETALL', DEPTH))
  local function add(name) texts[name] = texts[name] or '' end
  for class in pairs(CLASSES) do
    local tenants = try('ZRANGE', heads_key(class), 0, -1)
    for _, tenant in ipairs(failed(tenants) and {} or tenants) do add(lane_name(class, tenant)) end
  end
  for _, name in ipairs(also) do add(name) end
  return texts
end

local function texts_of(lanes)
  local texts = {}
  for i, text in ipairs(#lanes > 0 and call('HMGET', DEPTH, unpack(lanes)) or lanes) do texts[lanes[i]] = text or '' end
  return texts
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

local function last_id(stream)
  local about = try('XINFO', 'STREAM', stream)
  return failed(about) and '0-0' or as_map(about)['last-generated-id']
end

-- Jobs that wait on no lane.
local function num_off_lanes() return call('ZCARD', DELAYED) + call('ZCARD', SUSPECTS) end

-- Two counts with the same stamp have counted the same jobs in the same places: each change of a job's state is an
-- event, each entry for a lane that pulls find is a notification, and other moves change the number of delayed jobs.
local function stamp() return last_id(OUTBOX) .. '/' .. last_id(NOTIFICATIONS) .. '/' .. num_off_lanes() end

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

-- Count the entries of every lane, or of the named ones: of a slice (`is_slice` is '1'), or if there are many. Returns
-- whether it was every lane, lanes whose count in `depth` differs from their length, and lanes that are not listed.
local function count_lanes(named, is_slice)
  local num_entries, wrong_lanes, unlisted, all = 0, {}, {}, is_slice ~= '1' and all_lanes(named) or nil
  for name, text in pairs(all or texts_of(named)) do
    local length = length_of(name)
    num_entries = num_entries + length
    if length > 0 and not is_listed(name) then unlisted[#unlisted + 1] = name end
    if length ~= (tonumber(string.match(text, '^%d+') or '') or 0) then
      wrong_lanes[#wrong_lanes + 1] = { name, text, length }
    end
  end
  return num_entries, all ~= nil, wrong_lanes, unlisted
end
