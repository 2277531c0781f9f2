-- include: lib_format_1 lib_migration
-- Move a slice of the jobs on lanes of format 1, in the order of each lane.
--
-- KEYS: config.
-- Reply: jobs moved, and 1 if more may be left on lanes.
-- Reads: batch, depth, heads, job, parked, ready, served, tenants, 1:batch, 1:depth, 1:heads, 1:idem, 1:job, 1:lane,
--   1:leases, 1:suspects, 1:tenants.
-- Writes: batch, bell, callbacks, channel, counters, delayed, depth, garbage, heads, idem, job, lane, members, payload,
--   readers, ready, result, served, tenants, timers, 1:batch, 1:channel, 1:counters, 1:dead, 1:delayed, 1:depth,
--   1:heads, 1:idem, 1:job, 1:lane, 1:leases, 1:members, 1:payload, 1:readers, 1:ready, 1:result, 1:suspects,
--   1:tenants, 1:timers.
-- Bound: LIMITS.SLICE_JOBS entries, until LIMITS.SLICE_CHANNELS channels are moved.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local num_moved, num_read = 0, 0

-- An entry whose job does not name it is a leftover, or another program's. One whose job cannot be moved stays.
local function move_entry(name, entry)
  local job, place = earlier.load(entry.at and entry.job or '')
  if not job or place.entry ~= entry.id or place.lane ~= name or job.state ~= 'queued' then
    if place ~= 'unknown' then to_garbage(earlier.key('lane', name), entry.job or '') end
    return earlier.discard(name, entry.id)
  end
  local answer = move_job(entry.job, entry.at)
  if answer == 'taken' then return true end
  if answer == 'waiting' then num_moved = num_moved + 1 end
end

local function move_lane(name)
  local entries = earlier.entries(name, LIMITS.SLICE_JOBS - num_read)
  local num_left = 0
  for _, entry in ipairs(entries) do
    if slice.is_spent() then return end
    num_read = num_read + 1
    if move_entry(name, entry) then num_left = num_left + 1 end
  end
  -- Nothing here can be moved: the jobs behind are found by their hashes.
  if num_left == #entries then earlier.unlist(name) end
end

local function is_full() return num_read >= LIMITS.SLICE_JOBS or slice.is_spent() end

-- One lane of each class: the next call sees the others.
local num_lanes = 0
for _, class in ipairs({ RETURNED, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0 }) do
  local name = not is_full() and earlier.first_lane(class)
  if name then
    num_lanes = num_lanes + 1
    move_lane(name)
  end
end
finish()
earlier.finish()
return { num_moved, num_lanes > 0 and 1 or 0 }
