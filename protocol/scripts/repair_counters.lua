-- include: lib_counts
-- Set the counters to values counted in this script. Sums of tokens and bytes come from the caller, and are used if
-- nothing has changed since.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: packed array of lanes whose keys were seen; stamp, waiting tokens and bytes summed up at that stamp, or '';
--   packed array of {lane, its text in `depth` at that time, tokens}; packed array of {tenant, waiting jobs, tokens,
--   bytes}, summed up at that stamp too.
-- Reply: names of the counters and lanes that were changed.
-- Reads: alive, counters, delayed, depth, heads, held, job, lane, outbox, parked, ready, served, suspects, tenants.
-- Writes: counters, depth, heads, ready, tenants.
-- Bound: all lanes, workers and tenants, a few commands for each.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local also, summed = rows_of(ARGV[1], math.huge, 'string'), rows_of(ARGV[5], math.huge, 'string', 'string', 'number')
local of_tenants = rows_of(ARGV[6], math.huge, 'string', 'number', 'number', 'number')
local function is_sound()
  for _, lane in ipairs(summed) do
    if not whole(lane[3], LIMITS.MAX_NUMBER) then return false end
  end
  for _, row in ipairs(of_tenants) do
    for i = 2, 4 do
      if not whole(row[i], LIMITS.MAX_NUMBER) then return false end
    end
  end
  return is_optional(ARGV[2], LIMITS.MAX_STAMP_BYTES) and whole(ARGV[3], LIMITS.MAX_NUMBER)
    and whole(ARGV[4], LIMITS.MAX_NUMBER)
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

local function repair_lanes()
  for _, lane in ipairs(summed) do
    if (call('HGET', DEPTH, lane[1]) or '') == lane[2] then
      write_depth(lane[1], lane[2], length_of(lane[1]), lane[3])
    end
  end
  local _, _, wrong_lanes, unlisted = count_up(also)
  for _, lane in ipairs(wrong_lanes) do
    write_depth(lane[1], lane[2], lane[3], tonumber(string.match(lane[2], '^%d+ (%d+)') or '') or 0)
  end
  for _, name in ipairs(unlisted) do list_again(name) end
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
  local wanted = {}
  for _, row in ipairs(of_tenants) do wanted[row[1]] = row end
  for _, tenant in ipairs(call('HKEYS', TENANTS)) do wanted[tenant] = wanted[tenant] or { tenant, 0, 0, 0 } end
  for tenant, row in pairs(wanted) do
    local held = waiting_of(tenant)
    if held.jobs ~= row[2] or held.tokens ~= row[3] or held.bytes ~= row[4] then
      held.jobs, held.tokens, held.bytes, held.is_changed = row[2], row[3], row[4], true
      changed[#changed + 1] = 'tenant ' .. tenant
    end
  end
end

repair_lanes()
local waiting, running = count_up(also)
set('waiting_jobs', waiting)
set('running_jobs', running)
if ARGV[2] ~= '' and ARGV[2] == stamp() then
  set('waiting_tokens', tonumber(ARGV[3]))
  set('waiting_bytes', tonumber(ARGV[4]))
  repair_tenants()
end
repair_submitted()
finish()
return changed
