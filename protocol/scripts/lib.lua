-- Shared by the scripts beyond the base: keys, settings, time, counters, and reading and writing jobs.
-- docs/reference/keys.md describes every key, docs/reference/job-states.md every change.
--
-- Scripts do not roll back. So the keys of a job are checked (or used with `try`) before the first write for that job,
-- and a wrong key of the queue stops the script before any write (`wrong_key`).

local OUTBOX, CALLBACKS, NOTIFICATIONS = PREFIX .. 'outbox', PREFIX .. 'callbacks', PREFIX .. 'bell'
local TIMERS, COUNTERS, DEPTH = PREFIX .. 'timers', PREFIX .. 'counters', PREFIX .. 'depth'
local DEAD, SUSPECTS, ISOLATOR = PREFIX .. 'dead', PREFIX .. 'suspects', PREFIX .. 'isolator'
local ALIVE, SERVED, GARBAGE, DELAYED = PREFIX .. 'alive', PREFIX .. 'served', PREFIX .. 'garbage', PREFIX .. 'delayed'
local RETURNED = 'returned'

-- Return an error reply if a key of the queue (or of this incarnation) has the wrong type, else nil. Scripts return it
-- before any write. `also`: a hash that only some scripts write.
local function wrong_key(incarnation, also)
  local types = {
    OUTBOX, 'stream', CALLBACKS, 'stream', NOTIFICATIONS, 'stream', GARBAGE, 'stream', LEASES, 'hash', COUNTERS, 'hash',
    DEPTH, 'hash', SERVED, 'hash', TIMERS, 'zset', DEAD, 'zset', SUSPECTS, 'zset', ALIVE, 'zset', DELAYED, 'zset',
    ISOLATOR, 'string',
  }
  if incarnation then
    for _, name in ipairs({ 'held:', 'worker:' }) do
      types[#types + 1] = PREFIX .. name .. incarnation
      types[#types + 1] = 'hash'
    end
  end
  if also then types[#types + 1], types[#types + 2] = also, 'hash' end
  for i = 1, #types, 2 do
    local key, wanted = types[i], types[i + 1]
    local found = call('TYPE', key).ok
    if found ~= wanted and found ~= 'none' then
      return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. found .. ' and must be a ' .. wanted)
    end
  end
end

-- ---------------------------------------------------------------- settings and time

local function as_map(flat)
  local map = {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

local SETTINGS = as_map(call('HGETALL', KEYS[1]))

-- The least value of settings that are not from 0. Times to live must be over 0: SET refuses PX 0 in the middle of a
-- script.
local LEAST = {
  channel_ttl_ms = 1, result_ttl_ms = 1, idempotency_ttl_ms = 1, max_failures = 1, partitions = 1,
  tenant_share_percent = 1,
  bytes_per_token = 0.01, test_clock_offset_ms = -LIMITS.MAX_NUMBER,
}
local HAS_FRACTION = {
  bytes_per_token = true, ms_per_token = true, ttft_target_ms = true, tpot_target_ms = true,
}

-- The value of a setting that is a number; nil if it is out of its range.
local function setting_in_range(name, text)
  local value = tonumber(text)
  if not value then return nil end
  -- Not a number compares as false, so each bound is stated as what must hold.
  local is_in_range = value >= (LEAST[name] or 0) and value <= LIMITS.MAX_NUMBER
  return is_in_range and (HAS_FRACTION[name] or value % 1 == 0) and value or nil
end

local function setting(name, default)
  return setting_in_range(name, SETTINGS[name]) or default
end

-- The server's clock in milliseconds. Two settings are for tests: `test_clock_ms` stops the clock of the queue,
-- `test_clock_offset_ms` shifts it.
local function server_clock()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local NOW = setting('test_clock_ms') or server_clock() + setting('test_clock_offset_ms', 0)
-- A time of `ms` from now.
local function from_now(ms) return ms and math.min(NOW + ms, LIMITS.MAX_NUMBER) end
-- The time by which heartbeats expire. Only heartbeats advance it, each by what has passed since the one before, but at
-- most by `most`. So a step of the server's clock, or a failover to another clock, neither kills workers nor delays a
-- takeover for long. Before the first heartbeat it is the server's clock.
local CLOCK = PREFIX .. 'clock'
local function beat_time(most)
  local found = call('HMGET', CLOCK, 'at', 'read', 'most')
  local at, read = tonumber(found[1] or ''), tonumber(found[2] or '')
  if not at or not read then return NOW end
  return at + math.max(0, math.min(NOW - read, most or tonumber(found[3]) or 0))
end
-- For each model a set of the workers that serve it: so whether one does costs the same however many live.
local SERVING = PREFIX .. 'serving:'
-- `<offer>\n<model>` -> the last expiry among the workers that have it: how many are compared depends on the engines alone.
local OFFERS = PREFIX .. 'offers'
-- `<adapter>\n<model>` -> the last expiry among the workers of the model that have the adapter.
local PARENTS = PREFIX .. 'parents'
local QUEUE = string.match(PREFIX, '^{(.*):%d+}:$')
-- Lua formats a number at each command, and this one is used often.
local NOW_TEXT = string.format('%d', NOW)
local DEFAULT_MODE = 'fair'
local MODE = SETTINGS.mode or DEFAULT_MODE

-- ---------------------------------------------------------------- names

local function lane_key(class, tenant) return PREFIX .. 'lane:' .. class .. ':' .. tenant end
local function channel_key(job, choice) return PREFIX .. 'channel:' .. job.suffix .. ':' .. choice end
local function payload_key(job) return PREFIX .. 'payload:' .. job.suffix end
local function result_key(job) return PREFIX .. 'result:' .. job.suffix end
local function held_key(incarnation) return PREFIX .. 'held:' .. incarnation end
local function worker_key(incarnation) return PREFIX .. 'worker:' .. incarnation end
local function batch_key(batch) return PREFIX .. 'batch:' .. batch end
-- Keys are per tenant: two tenants may choose the same.
local function idem_key(job) return PREFIX .. 'idem:' .. job.tenant .. ':' .. job.key end

-- ---------------------------------------------------------------- writes that `finish` makes once

local counted, events, has_notification = {}, {}, false

local function count(name, by) counted[name] = (counted[name] or 0) + by end
local function notify() has_notification = true end

-- One change of a job's state for the history. The submit time says of which submission it is: an id may be used again.
-- A higher version of the same submission wins there.
local function emit(kind, job, fields, version, at)
  fields.submitted_ms = job.submitted
  events[#events + 1] = { kind, job.id, version or job.version, at or NOW, fields }
end

-- Append to a stream that users share. One of them may have added the last possible id, after which a stream takes no
-- more: it is made again, with its entries of ours.
local function append_shared(key, ...)
  local added = try('XADD', key, ...)
  if not failed(added) then return end
  if not string.find(added.err, 'exhausted', 1, true) then error(added.err) end
  local entries = key == OUTBOX and try('XRANGE', key, '-', '+') or {}
  -- A submitting user may neither read nor delete it; the next script of a worker does.
  if failed(entries) or failed(try('DEL', key)) then return end
  for _, entry in ipairs(entries) do
    if entry[2][1] == 'e' then call('XADD', key, '*', 'e', entry[2][2]) end
  end
  call('XADD', key, ...)
end

-- Record a foreign entry or a key of the wrong type for inspection, truncated; only the newest are kept.
local function to_garbage(where, what)
  append_shared(GARBAGE, 'MAXLEN', '~', LIMITS.GARBAGE_MAXLEN, '*', 'where', where, 'what',
    string.sub(what, 1, LIMITS.GARBAGE_ENTRY_BYTES))
end

-- ---------------------------------------------------------------- jobs

local whole, load_job, load_running, MOST

do

-- The greatest value of each field that is a whole number. A user that may submit may write its jobs' hashes, so every
-- field is checked before a script uses it; fields that are not listed here are text.
MOST = {
  class = LIMITS.MAX_PRIORITY, choices = LIMITS.MAX_CHOICES, max_tokens = LIMITS.MAX_TOKENS,
  version = LIMITS.MAX_VERSION, prompt = LIMITS.MAX_NUMBER, cost = LIMITS.MAX_NUMBER, bytes = LIMITS.MAX_NUMBER,
  submitted = LIMITS.MAX_NUMBER, number = LIMITS.MAX_NUMBER, before = LIMITS.MAX_NUMBER, attempt = LIMITS.MAX_NUMBER,
  epoch = LIMITS.MAX_NUMBER, started = LIMITS.MAX_NUMBER, charged = LIMITS.MAX_NUMBER, scheduled = LIMITS.MAX_NUMBER,
  first_token = LIMITS.MAX_NUMBER, ended = LIMITS.MAX_NUMBER, output = LIMITS.MAX_NUMBER, retry = LIMITS.MAX_NUMBER,
  waits_since = LIMITS.MAX_NUMBER,
  not_before = LIMITS.MAX_NUMBER, ttl = LIMITS.MAX_NUMBER, deadline = LIMITS.MAX_NUMBER, gap = LIMITS.MAX_NUMBER, callback = LIMITS.MAX_NUMBER,
  failures = LIMITS.MAX_NUMBER, requeues = LIMITS.MAX_NUMBER, prompt_bytes = LIMITS.MAX_NUMBER,
  parts = LIMITS.MAX_SPEC_PARTS, line = LIMITS.MAX_NUMBER,
}

-- A whole number from 0 to `most`, or nil: also for text, fractions, infinity and nan.
function whole(text, most)
  local number = tonumber(text or '')
  if number and number >= 0 and number <= most and number % 1 == 0 then return number end
end

-- The name of a text field that no script of ours wrote, or nil.
local function foreign_text(job)
  local is_state = string.find(job.state, '^%a+$') and string.find(TRANSITIONS, '>' .. job.state .. ' ', 1, true)
  if not is_state then return 'state' end
  if job.seed and not (#job.seed <= 20 and string.find(job.seed, '^%d+$')) then return 'seed' end
  if job.spec and #job.spec > LIMITS.MAX_SPEC_BYTES then return 'spec' end
  if job.resolved and #job.resolved > LIMITS.MAX_SPEC_BYTES then return 'resolved' end
  if job.declined and #job.declined > 16 * LIMITS.MAX_OFFERS then return 'declined' end
  if not job.entry then return nil end
  local ms, number = string.match(job.entry, '^(%d+)%-(%d+)$')
  if not ms or #ms > 19 or #number > 19 then return 'entry' end
  -- A lane of another tenant would let this job delete its entries.
  local class, tenant = string.match(job.lane or '', '^([^:]+):(.+)$')
  if tenant ~= job.tenant or class ~= RETURNED and not whole(class, LIMITS.MAX_PRIORITY) then return 'lane' end
end

-- Return the job as a table, or nil and why: 'unknown', 'not a job id', 'wrong type', 'not a job: <field>'. Absent and
-- empty fields are nil, except counts, which are 0. `is_of_caller`: the caller may read the job and no more than that
-- (docs/explanation/security.md), so the number of its fields is not asked for.
function load_job(id, is_of_caller)
  local tenant, suffix = names_of(id)
  if not tenant then return nil, 'not a job id' end
  local hash = PREFIX .. 'job:' .. suffix
  -- Its user may have added any number of fields. Of a key of the wrong type, the next command says so.
  local size = not is_of_caller and try('HLEN', hash)
  if tonumber(size) and size > LIMITS.MAX_JOB_FIELDS then return nil, 'not a job: too many fields' end
  local flat = try('HGETALL', hash)
  if failed(flat) then return nil, 'wrong type' end
  if #flat > 2 * LIMITS.MAX_JOB_FIELDS then return nil, 'not a job: too many fields' end
  if not flat[1] then return nil, 'unknown' end
  local job = {
    id = id, hash = hash, tenant = tenant, suffix = suffix, bytes = 0, epoch = 0, attempt = 0, failures = 0,
    requeues = 0, number = 0, before = 0,
  }
  for i = 1, #flat, 2 do
    local name, value = flat[i], flat[i + 1]
    if value ~= '' then
      local most = MOST[name]
      job[name] = most and whole(value, most) or not most and value or nil
      if not job[name] then return nil, 'not a job: ' .. name end
    end
  end
  for i = 1, job.parts or 0 do job.spec = (job.spec or '') .. (job['spec.' .. i] or '') end
  for _, name in ipairs({ 'state', 'version', 'class', 'submitted', 'choices', 'cost', 'prompt', 'max_tokens' }) do
    if not job[name] then return nil, 'not a job: ' .. name end
  end
  local foreign = job.choices == 0 and 'choices' or foreign_text(job)
  if foreign then return nil, 'not a job: ' .. foreign end
  return job
end

-- The job if it runs, as a lease of it says; else nil and why.
function load_running(id)
  local job, why = load_job(id)
  if job and job.state ~= 'running' then return nil, 'not a job: state' end
  return job, why
end

end

-- Move a job to another state, by the table of states.py, and increase its version.
local function enter(job, state)
  if not string.find(TRANSITIONS, ' ' .. job.state .. '>' .. state .. ' ', 1, true) then
    error('job ' .. job.id .. ' cannot go from ' .. job.state .. ' to ' .. state)
  end
  job.state = state
  job.version = job.version + 1
end

-- ---------------------------------------------------------------- leases

local function new_lease(choices)
  local lease = { '', 0, '', '', 0 }
  for choice = 0, choices - 1 do
    lease[FIRST + 2 * choice] = 0
    lease[FIRST + 2 * choice + 1] = 0
  end
  return lease
end

local function read_lease(id)
  local packed = call('HGET', LEASES, id)
  return packed and cmsgpack.unpack(packed) or nil
end

local function write_lease(id, lease) call('HSET', LEASES, id, cmsgpack.pack(lease)) end

local function published_tokens(lease)
  local total = 0
  if lease then
    for i = FIRST, #lease, 2 do total = total + lease[i] end
  end
  return total
end

-- Offset and end of all choices as text, `12:2,7:1`: kept in the hash of a job without a lease.
local function offsets_of(lease)
  local offsets = {}
  for at = FIRST, #lease, 2 do offsets[#offsets + 1] = string.format('%d:%d', lease[at], lease[at + 1]) end
  return table.concat(offsets, ',')
end

-- Delete a lease whose job does not exist any more: there is nothing to end.
local function forget_lease_of_nothing(id, lease, why)
  call('HDEL', LEASES, id)
  if lease[OWNER] ~= '' then
    call('HDEL', held_key(lease[OWNER]), id)
    count('running_jobs', -1)
  end
  to_garbage(LEASES, id .. ': ' .. why)
end
