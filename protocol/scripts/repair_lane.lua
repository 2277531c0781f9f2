-- Remove entries without a job from a lane. Checks each again before it is removed.
--
-- KEYS: config.
-- ARGV: class, tenant, packed array of entry ids.
-- Reply: for each 1, or 0 if it does not exist or is the entry of a job.
-- Reads: depth, job, lane, parked, served.
-- Writes: depth, garbage, heads, lane, ready.
-- Bound: LIMITS.SLICE_JOBS entries.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local class, tenant, entries = ARGV[1], ARGV[2], rows_of(ARGV[3], LIMITS.SLICE_JOBS, 'string')
local function is_sound()
  if class ~= RETURNED and not whole(class, LIMITS.MAX_PRIORITY) then return false end
  for _, id in ipairs(entries) do
    if not string.find(id, '^%d+%-%d+$') then return false end
  end
  return is_text(tenant, LIMITS.MAX_TENANT_CHARS) and not string.find(tenant, '[^a-z0-9_-]')
end
if not is_sound() then return wrong_arguments() end
local lane = open_lane(class, tenant)

local function is_some_jobs(entry)
  local parsed = parse_entry(entry)
  local job = parsed and load_job(parsed.job)
  return job and job.state == 'queued' and job.entry == entry[1] and job.lane == lane.name
end

local function drop(id)
  local entry = call('XRANGE', lane.key, id, id)[1]
  if not entry or is_some_jobs(entry) then return 0 end
  to_garbage(lane.key, 'no job stands behind it: ' .. table.concat(entry[2], ' '))
  call('XDEL', lane.key, id)
  lane.has_lost = true
  return 1
end

local answers = {}
for i, id in ipairs(entries) do answers[i] = lane.is_sound and drop(id) or 0 end
finish()
return answers
