-- include: lib_counts
-- Set the counters to values counted in this script. Sums come from the caller, and are used if nothing has changed
-- since; also the number of waiting jobs, if there are too many lanes to count them all in one call.
--
-- KEYS: config.
-- ARGV: lanes and whether they are a slice, as in `audit_counts`; stamp or ''; waiting jobs, tokens and bytes summed
--   up at that stamp; packed array of {lane, its text in `depth` at that time, tokens}; packed array of
--   {tenant, waiting jobs, tokens, bytes} of tenants with other numbers, summed up at that stamp too.
-- Reply: names of the counters and lanes that were changed.
-- Reads: alive, bell, counters, delayed, depth, heads, held, job, lane, outbox, parked, ready, served, suspects,
--   tenants.
-- Writes: counters, depth, heads, ready, tenants.
-- Bound: LIMITS.LANES_PER_COUNT lanes that are named, or as many as there are in all; all workers;
--   LIMITS.LANES_PER_COUNT sums of lanes, and of tenants.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local MOST = LIMITS.LANES_PER_COUNT
local named, summed = rows_of(ARGV[1], MOST, 'string'), rows_of(ARGV[7], MOST, 'string', 'string', 'number')
local of_tenants = rows_of(ARGV[8], MOST, 'string', 'number', 'number', 'number')
local function is_sound()
  for _, lane in ipairs(summed) do
    if not whole(lane[3], LIMITS.MAX_NUMBER) then return false end
  end
  for _, row in ipairs(of_tenants) do
    for i = 2, 4 do
      if not whole(row[i], LIMITS.MAX_NUMBER) then return false end
    end
  end
  return is_optional(ARGV[3], LIMITS.MAX_STAMP_BYTES) and whole(ARGV[4], LIMITS.MAX_NUMBER)
    and whole(ARGV[5], LIMITS.MAX_NUMBER) and whole(ARGV[6], LIMITS.MAX_NUMBER)
end
if not is_sound() then return wrong_arguments() end

local changed = {}

local function set(name, value)
  if tonumber(call('HGET', COUNTERS, name) or '0') == value then return end
  call('HSET', COUNTERS, name, value)
  changed[#changed + 1] = name
end

-- Sets waiting jobs and tokens. The totals added and taken are kept, so that positions in the queue stay valid.
local function write_depth(name, text, jobs, tokens)
  if jobs == 0 then
    call('HDEL', DEPTH, name)
  else
    local rest = string.match(text, '^%d+ %d+ (.*)$') or '0 0 0 0'
    call('HSET', DEPTH, name, string.format('%d %d %s', jobs, tokens, rest))
  end
  changed[#changed + 1] = name
end

-- `finish` lists it by its head.
local function list_again(name)
  local class, tenant = string.match(name, '^([^:]+):(.+)$')
  open_lane(class, tenant).has_lost = true
  changed[#changed + 1] = name
end

-- Returns the entries of all lanes, false if not all were counted.
local function repair_lanes()
  for _, lane in ipairs(summed) do
    if (call('HGET', DEPTH, lane[1]) or '') == lane[2] then
      write_depth(lane[1], lane[2], length_of(lane[1]), lane[3])
    end
  end
  local num_entries, is_all, wrong_lanes, unlisted = count_lanes(named, ARGV[2])
  for _, lane in ipairs(wrong_lanes) do
    write_depth(lane[1], lane[2], lane[3], tonumber(string.match(lane[2], '^%d+ (%d+)') or '') or 0)
  end
  for _, name in ipairs(unlisted) do list_again(name) end
  return is_all and num_entries
end

-- Count from the sum: every job that was ever accepted is in one state.
local function repair_submitted()
  local total = 0
  for _, name in ipairs({ 'done', 'failed', 'cancelled', 'expired', 'waiting_jobs', 'running_jobs' }) do
    total = total + (tonumber(call('HGET', COUNTERS, name) or '') or 0)
  end
  set('submitted', total)
end

local function repair_tenants()
  if not is_type(TENANTS, 'hash') then call('DEL', TENANTS) end
  for _, row in ipairs(of_tenants) do
    local tenant, held = row[1], waiting_of(row[1])
    if held.jobs ~= row[2] or held.tokens ~= row[3] or held.bytes ~= row[4] then
      held.jobs, held.tokens, held.bytes, held.is_changed = row[2], row[3], row[4], true
      changed[#changed + 1] = 'tenant ' .. tenant
    end
  end
end

local function repair_waiting(num_entries, is_as_summed)
  if not (num_entries or is_as_summed) then return end
  set('waiting_jobs', num_entries and num_entries + num_off_lanes() or tonumber(ARGV[4]))
  repair_submitted()
end

local num_entries, is_as_summed = repair_lanes(), ARGV[3] == stamp()
set('running_jobs', held_jobs())
repair_waiting(num_entries, is_as_summed)
if is_as_summed then
  set('waiting_tokens', tonumber(ARGV[5]))
  set('waiting_bytes', tonumber(ARGV[6]))
  repair_tenants()
end
finish()
return changed
