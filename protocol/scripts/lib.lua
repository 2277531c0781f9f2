-- Shared by the scripts beyond the base: keys, counters, and reading and writing jobs.
-- docs/reference/keys.md describes every key, docs/reference/job-states.md every change.
--
-- Scripts do not roll back. So the keys of a job are checked (or used with `try`) before the first write for that job,
-- and a wrong key of the queue stops the script before any write (`wrong_key`).

local OUTBOX, CALLBACKS = PREFIX .. 'outbox', PREFIX .. 'callbacks'
local COUNTERS, DEPTH = PREFIX .. 'counters', PREFIX .. 'depth'
local DEAD, ISOLATOR = PREFIX .. 'dead', PREFIX .. 'isolator'
local SERVED, GARBAGE, DELAYED = PREFIX .. 'served', PREFIX .. 'garbage', PREFIX .. 'delayed'

-- Return an error reply if a key of the queue (or of this incarnation) has the wrong type, else nil. Scripts return it
-- before any write. Others: hashes that only some scripts write.
local function wrong_key(incarnation, ...)
  local types = {
    OUTBOX, 'stream', CALLBACKS, 'stream', NOTIFICATIONS, 'stream', GARBAGE, 'stream', COUNTERS, 'hash',
    DEPTH, 'hash', SERVED, 'hash', TIMERS, 'zset', DEAD, 'zset', SUSPECTS, 'zset', ALIVE, 'zset', DELAYED, 'zset',
    ISOLATOR, 'string',
  }
  if incarnation then
    for _, name in ipairs({ 'held:', 'worker:' }) do
      types[#types + 1] = PREFIX .. name .. incarnation
      types[#types + 1] = 'hash'
    end
  end
  for _, key in ipairs({ ... }) do types[#types + 1], types[#types + 2] = key, 'hash' end
  for i = 1, #types, 2 do
    local key, wanted = types[i], types[i + 1]
    local found = call('TYPE', key).ok
    if found ~= wanted and found ~= 'none' then
      return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. found .. ' and must be a ' .. wanted)
    end
  end
end

-- For each model a set of the workers that serve it: so whether one does costs the same however many live.
local SERVING = PREFIX .. 'serving:'
-- `<offer>\n<model>` -> the last expiry among the workers that have it: how many are compared depends on the engines
-- alone.
local OFFERS = PREFIX .. 'offers'
-- `<adapter>\n<model>` -> the last expiry among the workers of the model that have the adapter.
local PARENTS = PREFIX .. 'parents'
local QUEUE = string.match(PREFIX, '^{(.*):%d+}:')
local DEFAULT_MODE = 'fair'
local MODE = SETTINGS.mode or DEFAULT_MODE

-- ---------------------------------------------------------------- names

local function lane_name(class, tenant) return CLASSES[class] .. ':' .. tenant end
local function lane_key(class, tenant) return PREFIX .. 'lane:' .. lane_name(class, tenant) end
local function row_key(job) return PREFIX .. 'job:' .. job.suffix end
local function channel_key(job, choice) return channel_of(job.suffix, choice) end
local function payload_key(job) return PREFIX .. 'payload:' .. job.suffix end
local function result_key(job) return PREFIX .. 'result:' .. job.suffix end
local function worker_key(incarnation) return PREFIX .. 'worker:' .. incarnation end
local function batch_key(batch) return PREFIX .. 'batch:' .. batch end
-- Keys are per tenant: two tenants may choose the same.
local function idem_key(job) return PREFIX .. 'idem:' .. job.tenant .. ':' .. job.key end

-- ---------------------------------------------------------------- writes that `finish` makes once

local counted, events, has_notification = {}, {}, false

local function count(name, by) counted[name] = (counted[name] or 0) + by end
-- A job begins to run (1), or does not run any more (-1).
local function count_running(id, by)
  count('running_jobs', by)
  if limits then limits.count(id, by) end
end
local function notify() has_notification = true end

-- One change of a job's state for the history. The submit time says of which submission it is: an id may be used again.
-- A higher version of the same submission wins there.
local function emit(kind, job, fields, version, at)
  fields.submitted_ms = job.submitted
  events[#events + 1] = { kind, job.id, version or job.version, at or NOW, fields }
end

-- Append to a stream that users share. One of them may have added the last possible id, after which a stream takes no
-- more: it is made again, an outbox with its newest entries. The audit publishes events of others again.
local function append_shared(key, ...)
  local added = try('XADD', key, ...)
  if not failed(added) then return end
  if not string.find(added.err, 'exhausted', 1, true) then error(added.err) end
  local kept, num_bytes, before = {}, 0, '+'
  for _ = 1, key == OUTBOX and LIMITS.OUTBOX_KEPT or 0 do
    local found = try('XREVRANGE', key, before, '-', 'COUNT', '1')
    -- A submitting user may neither read nor delete it; the next script of a worker does.
    if failed(found) then return end
    if not found[1] or num_bytes >= LIMITS.OUTBOX_KEPT_BYTES then break end
    local id, fields = found[1][1], found[1][2]
    for i = 1, #fields do num_bytes = num_bytes + #fields[i] end
    if fields[1] == 'e' then kept[#kept + 1] = fields[2] end
    before = '(' .. id
  end
  if failed(try('UNLINK', key)) then return end
  for i = #kept, 1, -1 do call('XADD', key, '*', 'e', kept[i]) end
  call('XADD', key, ...)
end

-- Record a foreign entry or a key of the wrong type for inspection, truncated; only the newest are kept.
local function to_garbage(where, what)
  append_shared(GARBAGE, 'MAXLEN', '~', LIMITS.GARBAGE_MAXLEN, '*', 'where', where, 'what',
    string.sub(what, 1, LIMITS.GARBAGE_ENTRY_BYTES))
end

-- ---------------------------------------------------------------- jobs

-- A job is one string, its row (docs/reference/keys.md#a-jobs-row): numbers of fixed size, short texts, the fields that
-- only some jobs have as a packed map, and the spec, which no script reads. A script reads a row once, changes the
-- table, and `finish` writes each changed row once.

local load_job, load_jobs, load_running, save, state_and_class, MOST
local rows = {}

do

-- The greatest value of each field that is a whole number; fields that are not listed here are text.
MOST = {
  class = LIMITS.MAX_PRIORITY, choices = LIMITS.MAX_CHOICES, max_tokens = LIMITS.MAX_TOKENS,
  prompt = LIMITS.MAX_ROW_NUMBER, not_before = LIMITS.MAX_NUMBER, ttl = LIMITS.MAX_NUMBER, deadline = LIMITS.MAX_NUMBER,
  gap = LIMITS.MAX_NUMBER, callback = LIMITS.MAX_NUMBER, retry = LIMITS.MAX_NUMBER, waits_since = LIMITS.MAX_NUMBER,
  line = LIMITS.MAX_NUMBER, output = LIMITS.MAX_NUMBER,
}

-- Version of the format, state, class, choices, whether it is in the class of returned jobs, version, attempt, epoch,
-- failures, requeues, most tokens; prompt, cost, bytes, submitted, started, charged + 1, number, before, scheduled,
-- first token, ended, each 0 if it is absent; entry, owner; digest, seed and rare fields, each with its length. The
-- spec is the rest. Six bytes hold a whole number below 2^48, so that whatever another program writes there is one.
local FORMAT, ROW_VERSION = '<c1c1BBBI4I4I4I4I4I4I6I6I6I6I6I6I6I6I6I6I6ssHc0Bc0I4c0', '1'
local LETTERS, STATES = LETTERS_OF_STATES, STATES_OF_LETTERS

-- The fields that only some jobs have, in the packed map.
local IS_RARE = {
  batch = true, key = true, not_before = true, ttl = true, deadline = true, callback = true, custom_id = true,
  line = true, endpoint = true, fingerprint = true, resolved = true, gap = true, previous = true, published = true,
  deaths = true, retry = true, waits_since = true, asked = true, declined = true, reason = true, error = true,
  error_code = true, output = true, ended_by = true,
}
local MOST_TEXT = { resolved = LIMITS.MAX_SPEC_BYTES, declined = 16 * LIMITS.MAX_OFFERS }

-- The name of a rare field that no script of ours wrote, or nil. A user that may submit may write its jobs' rows, so
-- every field is checked before a script uses it.
local function foreign_rare(fields)
  if type(fields) ~= 'table' then return 'fields' end
  for name, value in pairs(fields) do
    local most = MOST[name]
    local is_sound = most and type(value) == 'number' and whole(value, most)
      or not most and IS_RARE[name] and type(value) == 'string' and #value <= (MOST_TEXT[name] or #value)
    if not is_sound then return tostring(name) end
  end
end

local function write_field(job, name, value)
  if IS_RARE[name] then job.rare[name] = value else rawset(job, name, value) end
end

-- Lua makes room for a field that is absent also when it is set to nil.
function rows.set_rare(rare, name, value)
  if value ~= nil or rare[name] ~= nil then rare[name] = value end
end

-- Give a job its rare fields: they are read and written as the others.
function rows.with_rare(job, rare)
  job.rare = rare
  return setmetatable(job, { __index = rare, __newindex = write_field })
end

-- The name of a field of fixed size, or a text, that no script of ours wrote, or nil.
local function foreign_field(job)
  if job.version > LIMITS.MAX_VERSION then return 'version' end
  if job.class > LIMITS.MAX_PRIORITY then return 'class' end
  if job.choices < 1 or job.choices > LIMITS.MAX_CHOICES then return 'choices' end
  if job.max_tokens > LIMITS.MAX_TOKENS then return 'max_tokens' end
  if #job.seed > 20 or not string.find(job.seed, '^%d+$') then return 'seed' end
  if #job.spec > LIMITS.MAX_SPEC_BYTES then return 'spec' end
  if not job.entry then return nil end
  local _, last, at = string.find(job.entry, '^%d+%-()%d+$')
  if not at or at > 21 or last - at > 18 then return 'entry' end
end

-- Fields of fixed size are there in each job, false if they are absent: assigning to one that is there is a plain
-- write.
local function present(value) return value ~= 0 and value end

-- The job of a row, or nil and why.
local function parse(id, tenant, suffix, row)
  if #row > LIMITS.MAX_ROW_BYTES then return nil, 'not a job: row' end
  local is_read, format, letter, class, choices, is_returned, version, attempt, epoch, failures, requeues, max_tokens,
    prompt, cost, bytes, submitted, started, charged, number, before, scheduled, first_token, ended, entry, owner,
    digest, seed, rare, after = pcall(struct.unpack, FORMAT, row)
  if not is_read or format ~= ROW_VERSION or not STATES[letter] then return nil, 'not a job: row' end
  local job = {
    id = id, tenant = tenant, suffix = suffix, state = STATES[letter], class = class, choices = choices,
    version = version, attempt = attempt, epoch = epoch, failures = failures, requeues = requeues,
    max_tokens = max_tokens, prompt = prompt, cost = cost, bytes = bytes, submitted = submitted,
    started = present(started), charged = charged > 0 and charged - 1, number = number, before = before,
    scheduled = present(scheduled), first_token = present(first_token), ended = present(ended),
    entry = entry ~= '' and entry, lane = false, owner = owner, digest = digest, seed = seed,
    spec = string.sub(row, after), keep_ms = false, packed = false,
  }
  local foreign, fields = foreign_field(job), { published = nil, ended_by = nil, output = nil, reason = nil }
  if not foreign and rare ~= '' then
    is_read, fields = pcall(cmsgpack.unpack, rare)
    foreign = not is_read and 'fields' or foreign_rare(fields)
  end
  if foreign then return nil, 'not a job: ' .. foreign end
  if job.entry then job.lane = lane_name(is_returned == 1 and RETURNED or class, tenant) end
  return rows.with_rare(job, fields)
end

function rows.of(job)
  local rare = next(job.rare) and cmsgpack.pack(job.rare) or ''
  local is_returned = job.lane and string.sub(job.lane, 1, #RETURNED) == RETURNED
  return struct.pack(FORMAT, ROW_VERSION, LETTERS[job.state], job.class, job.choices, is_returned and 1 or 0,
    job.version, job.attempt, job.epoch, job.failures, job.requeues, job.max_tokens, job.prompt, job.cost, job.bytes,
    job.submitted, job.started or 0, job.charged and job.charged + 1 or 0, job.number, job.before, job.scheduled or 0,
    job.first_token or 0, job.ended or 0, job.entry or '', job.owner, #job.digest, job.digest, #job.seed, job.seed,
    #rare, rare) .. job.spec
end

-- State and class of a row, without the rest.
function state_and_class(suffix)
  local head = try('GETRANGE', PREFIX .. 'job:' .. suffix, '0', '2')
  if failed(head) or #head < 3 then return nil end
  local _, letter, class = struct.unpack('<c1c1B', head)
  return STATES[letter], math.min(class, LIMITS.MAX_PRIORITY)
end

-- Rows that this call has read and not used, jobs that it has used, and those of them that `finish` writes.
local fetched, known, changed = {}, {}, {}

-- Return the job as a table, or nil and why: 'unknown', 'not a job id', 'wrong type', 'not a job: <field>'. Absent
-- fields are nil, except counts, which are 0. Within a call, each job is one table.
function load_job(id)
  if known[id] then return known[id] end
  local tenant, suffix = names_of(id)
  if not tenant then return nil, 'not a job id' end
  local row = fetched[id] or try('GET', PREFIX .. 'job:' .. suffix)
  if failed(row) then return nil, 'wrong type' end
  if not row then return nil, 'unknown' end
  local job, why = parse(id, tenant, suffix, row)
  known[id] = job
  return job, why
end

-- Read many jobs in one command; `load_job` then has them. Of other keys, `load_job` says what they are.
function load_jobs(ids)
  local keys, wanted = {}, {}
  for _, id in ipairs(ids) do
    local tenant, suffix = names_of(id)
    if tenant and not (known[id] or fetched[id]) then
      keys[#keys + 1] = PREFIX .. 'job:' .. suffix
      wanted[#keys] = id
    end
  end
  if #keys == 0 then return end
  local found = call('MGET', unpack(keys))
  for i = 1, #keys do
    if found[i] then fetched[wanted[i]] = found[i] end
  end
end

-- The job if it runs, as a lease of it says; else nil and why.
function load_running(id)
  local job, why = load_job(id)
  if job and job.state ~= 'running' then return nil, 'not a job: state' end
  return job, why
end

-- Write the row with the others at the end of the call. `keep_ms`: how long it is kept from now on, of an ended job.
function save(job, keep_ms)
  job.keep_ms, job.packed = keep_ms or job.keep_ms, false
  if not changed[job] then
    changed[job] = true
    changed[#changed + 1] = job
  end
  known[job.id] = job
end

-- Rows of ended jobs have a time to live, which another change of them leaves as it is.
function rows.write()
  local flat = {}
  for i = 1, #changed do
    local job = changed[i]
    if job.state == 'queued' or job.state == 'running' then
      flat[#flat + 1], flat[#flat + 2] = row_key(job), job.packed or rows.of(job)
    elseif job.keep_ms then
      call('SET', row_key(job), rows.of(job), 'PX', text_of(job.keep_ms))
    else
      call('SET', row_key(job), rows.of(job), 'KEEPTTL')
    end
  end
  for from = 1, #flat, 1000 do call('MSET', unpack(flat, from, math.min(from + 999, #flat))) end
  changed = {}
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

local leases = {}

function leases.new(choices)
  local lease = { 0, 0, owner = '', epoch = 0, number = 0, place = 0, flag = '', mark = ' ', deaths = 0 }
  for at = 3, 2 * choices do lease[at] = 0 end
  return lease
end

-- Offset and end of all choices as text, `12:2,7:1`: kept in the row of a job that nobody runs.
local function offsets_of(lease)
  local offsets = {}
  for at = 1, #lease, 2 do offsets[#offsets + 1] = string.format('%d:%d', lease[at], lease[at + 1]) end
  return table.concat(offsets, ',')
end

-- The lease of a running job; nil if its owner does not hold it.
function leases.held(job)
  local packed = try('HGET', held_key(job.owner), job.id)
  return type(packed) == 'string' and unpack_lease(job.owner, packed) or nil
end

-- All leases of an incarnation, {job id, lease}, in the order in which they were given; other values are left out.
function leases.all_of(incarnation)
  local all, flat = {}, call('HGETALL', held_key(incarnation))
  for i = 1, #flat, 2 do
    local lease = unpack_lease(incarnation, flat[i + 1])
    if lease then all[#all + 1] = { flat[i], lease } end
  end
  table.sort(all, function(a, b)
    if a[2].number ~= b[2].number then return a[2].number < b[2].number end
    return a[2].place < b[2].place
  end)
  return all
end

-- What a job has published, as a lease without an owner. Only choices that ended well stay ended in a requeue.
function leases.of_row(job, is_requeue)
  local lease, choice = leases.new(job.choices), 0
  for offset, ended in string.gmatch(job.published or '', '(%d+):(%d)') do
    if choice >= job.choices then break end
    lease[2 * choice + 1] = whole(offset, LIMITS.MAX_TOKENS) or 0
    lease[2 * choice + 2] = is_requeue and ended ~= '2' and 0 or tonumber(ended)
    choice = choice + 1
  end
  lease.epoch = job.epoch
  return lease
end

-- The lease of a job, or what it has published without one. nil: it runs, and its owner does not hold it.
function leases.of(job)
  if job.state == 'running' then return leases.held(job) end
  return leases.of_row(job)
end

function leases.write(job, lease) call('HSET', held_key(job.owner), job.id, pack_lease(lease)) end

local function published_tokens(lease)
  local total = 0
  if lease then
    for i = 1, #lease, 2 do total = total + lease[i] end
  end
  return total
end

-- Delete a lease whose job does not exist any more: there is nothing to end.
local function forget_lease_of_nothing(incarnation, id, why)
  call('HDEL', held_key(incarnation), id)
  count_running(id, -1)
  to_garbage(held_key(incarnation), id .. ': ' .. why)
end
