-- Cancel one slice of the waiting jobs: on lanes, among the suspects, and delayed ones.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: tenant or ''.
-- Reply: {how many, 1 if more may be left}.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local only = ARGV[1]
if not is_optional(only, LIMITS.MAX_TENANT_CHARS) or string.find(only, '[^a-z0-9_-]') then return wrong_arguments() end
local left = LIMITS.SLICE_JOBS

local function cancel(id)
  local job = load_job(id)
  if not job or job.state ~= 'queued' then return false end
  end_without_worker(job, read_lease(id), 'cancelled', END_REASONS.cancelled)
  left = left - 1
  return true
end

local function purge_entry(lane, entry)
  local parsed = parse_entry(entry)
  local job = parsed and load_job(parsed.job)
  if job and job.state == 'queued' and job.entry == entry[1] then return cancel(job.id) end
  call('XDEL', lane.key, entry[1])
end

local function purge_lane(class, tenant)
  local lane = open_lane(class, tenant)
  if lane.is_sound then
    for _, entry in ipairs(call('XRANGE', lane.key, '-', '+', 'COUNT', left)) do purge_entry(lane, entry) end
  end
  relist(lane)
  lane.has_lost = false
end

local function purge_class(class)
  if only ~= '' then return purge_lane(class, only) end
  local passes = 0
  while left > 0 and passes < LIMITS.SLICE_JOBS do
    local tenant = call('ZRANGE', PREFIX .. 'heads:' .. class, 0, 0)[1]
    if not tenant then return end
    purge_lane(class, tenant)
    passes = passes + 1
  end
end

local function purge_lanes()
  purge_class(RETURNED)
  for class = 0, LIMITS.MAX_PRIORITY do
    if left > 0 then purge_class(class) end
  end
end

local function is_wanted(id) return only == '' or names_of(id) == only end

local function purge_suspects()
  for _, id in ipairs(call('ZRANGE', SUSPECTS, 0, LIMITS.MAX_JOBS_PER_CALL)) do
    if left > 0 and is_wanted(id) then cancel(id) end
  end
end

-- All members have score 0, so they are ordered by text, and the jobs of a tenant are adjacent.
local function purge_delayed()
  local partition = string.match(PREFIX, ':(%d+)}:$')
  local from, to = '-', '+'
  if only ~= '' then from, to = '[' .. partition .. '.' .. only .. '.', '(' .. partition .. '.' .. only .. '/' end
  for _, id in ipairs(call('ZRANGEBYLEX', DELAYED, from, to, 'LIMIT', 0, left)) do
    if not cancel(id) then call('ZREM', DELAYED, id) end
  end
end

purge_lanes()
if left > 0 then purge_suspects() end
if left > 0 then purge_delayed() end
finish()
return { LIMITS.SLICE_JOBS - left, left <= 0 and 1 or 0 }
