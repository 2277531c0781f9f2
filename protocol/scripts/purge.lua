-- Cancel one slice of the waiting jobs: on lanes, among the suspects, and delayed ones.
--
-- KEYS: config.
-- ARGV: tenant or ''.
-- Reply: {how many, 1 if more may be left}.
-- Reads: batch, buckets, delayed, depth, heads, job, lane, leased, limits, outbox, parked, ready, served, suspects,
--   tenants, weights.
-- Writes: batch, bell, buckets, callbacks, channel, counters, delayed, depth, garbage, heads, idem, job, lane, members,
--   outbox, parked, payload, ready, result, served, suspects, tenants, timers.
-- Bound: LIMITS.SLICE_JOBS jobs of LIMITS.LOOKS_PER_CALL lanes and entries, until LIMITS.SLICE_CHANNELS channels are
--   closed; all parked tenants.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local only = ARGV[1]
if not is_optional(only, LIMITS.MAX_TENANT_CHARS) or string.find(only, '[^a-z0-9_-]') then return wrong_arguments() end
local left, num_looked = LIMITS.SLICE_JOBS, 0
-- Lanes may be empty, and full of entries without a job: they count too.
local function is_spent() return left <= 0 or num_looked >= LIMITS.LOOKS_PER_CALL or slice.is_spent() end

local function cancel(id)
  local job = load_job(id)
  if not job or job.state ~= 'queued' then return false end
  end_without_worker(job, leases.of_row(job), 'cancelled', END_REASONS.cancelled)
  left = left - 1
  return true
end

local function purge_entry(lane, entry)
  local parsed = parse_entry(entry)
  local job = parsed and load_job(parsed.job)
  if job and job.state == 'queued' and job.entry == entry[1] then return cancel(job.id) end
  lane.gone[#lane.gone + 1] = entry[1]
end

-- Returns how many entries it removed.
local function purge_lane(class, tenant)
  local lane = open_lane(class, tenant)
  local entries = lane.is_sound and call('XRANGE', lane.key, '-', '+', 'COUNT', left) or {}
  num_looked = num_looked + 1 + #entries
  for _, entry in ipairs(entries) do
    if not slice.is_spent() then purge_entry(lane, entry) end
  end
  relist({ lane })
  lane.has_lost = false
  return #entries
end

local function purge_class(class)
  if only ~= '' then
    while not is_spent() and purge_lane(class, only) > 0 do end
    return
  end
  while not is_spent() and is_sound_class(class) do
    local tenant = call('ZRANGE', heads_key(class), 0, 0)[1]
    if not tenant then return end
    purge_lane(class, tenant)
  end
end

local function purge_lanes()
  purge_class(RETURNED)
  for class = 0, LIMITS.MAX_PRIORITY do
    if not is_spent() then purge_class(class) end
  end
end

-- The lanes of parked tenants are in no class.
local function purge_parked()
  for _, tenant in ipairs(limits.waiting_parked(left)) do
    for _, lane in ipairs(limits.lanes_of(tenant)) do
      while not is_spent() and purge_lane(lane.class, tenant) > 0 do end
    end
  end
end

local function is_wanted(id) return only == '' or names_of(id) == only end

local function purge_suspects()
  for _, id in ipairs(call('ZRANGE', SUSPECTS, 0, LIMITS.LOOKS_PER_CALL)) do
    if not is_spent() and is_wanted(id) then cancel(id) end
  end
end

-- All members have score 0, so they are ordered by text, and the jobs of a tenant are adjacent.
local function purge_delayed()
  local from, to = '-', '+'
  if only ~= '' then from, to = '[' .. PARTITION .. '.' .. only .. '.', '(' .. PARTITION .. '.' .. only .. '/' end
  for _, id in ipairs(call('ZRANGEBYLEX', DELAYED, from, to, 'LIMIT', 0, left)) do
    if not is_spent() and not cancel(id) then call('ZREM', DELAYED, id) end
  end
end

purge_lanes()
if limits and only == '' and not is_spent() then purge_parked() end
if not is_spent() then purge_suspects() end
if not is_spent() then purge_delayed() end
finish()
return { LIMITS.SLICE_JOBS - left, is_spent() and 1 or 0 }
