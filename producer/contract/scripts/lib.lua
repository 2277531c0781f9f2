-- What every script shares: names of keys, time, settings, counting, and the changes of a job that more than one script
-- makes. It stands before each script. docs/wire-format.md describes every key, docs/job-states.md every change.
--
-- KEYS[1] is always `<prefix>:config`. The other fixed keys are declared by the caller; lane and job keys are derived from
-- what a script reads, and lie in the same slot.
--
-- Scripts do not roll back. So whatever can be wrong with a job's keys is looked at (or tried with `try`) before the first
-- write for that job; what is wrong with the queue's own keys stops the script before any write (`wrong_key`).

local call, try = redis.call, redis.pcall
local PREFIX = string.sub(KEYS[1], 1, -7)

local OUTBOX, CALLBACKS, BELL = PREFIX .. 'outbox', PREFIX .. 'callbacks', PREFIX .. 'bell'
local LEASES, TIMERS, COUNTERS, DEPTH = PREFIX .. 'leases', PREFIX .. 'timers', PREFIX .. 'counters', PREFIX .. 'depth'
local DEAD, SUSPECTS, ISOLATOR = PREFIX .. 'dead', PREFIX .. 'suspects', PREFIX .. 'isolator'
local ALIVE, SERVED, GARBAGE, DELAYED = PREFIX .. 'alive', PREFIX .. 'served', PREFIX .. 'garbage', PREFIX .. 'delayed'
local RETURNED = 'returned'

-- ---------------------------------------------------------------- the call

-- At maxmemory Redis refuses the first growing write of a script, and lets all pass after one write of any kind. Only
-- submit may be refused: every other script begins with this one, which does nothing.
local function write_even_when_full()
  call('DEL', PREFIX .. 'nothing')
end

local function failed(reply) return type(reply) == 'table' and reply.err or nil end

-- An error reply when a key of the queue itself is not what it should be, else nil. Scripts return it before any write.
local function wrong_key()
  local wanted_types = {
    [OUTBOX] = 'stream', [CALLBACKS] = 'stream', [BELL] = 'stream', [GARBAGE] = 'stream', [LEASES] = 'hash',
    [COUNTERS] = 'hash', [DEPTH] = 'hash', [SERVED] = 'hash', [TIMERS] = 'zset', [DEAD] = 'zset', [SUSPECTS] = 'zset',
    [ALIVE] = 'zset', [DELAYED] = 'zset', [ISOLATOR] = 'string',
  }
  for key, wanted in pairs(wanted_types) do
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

local function setting(name, default)
  return tonumber(SETTINGS[name]) or default
end

-- The server's clock in milliseconds. Two settings are for tests alone, so that none need wait: `test_clock_ms` stops the
-- queue's clock at that time, `test_clock_offset_ms` moves it against the server's.
local function server_clock()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local NOW = setting('test_clock_ms') or server_clock() + setting('test_clock_offset_ms', 0)
local QUEUE = string.match(PREFIX, '^{(.*):%d+}:$')
local DEFAULT_MODE = 'fair'
local MODE = SETTINGS.mode or DEFAULT_MODE

-- ---------------------------------------------------------------- names

-- `<tenant>`, `<tenant>:<random>` of a job id; nil when it is none.
local function names_of(id)
  local tenant, random = string.match(id, '^%d+%.([a-z0-9_-]+)%.([A-Za-z0-9_-]+)$')
  if not tenant then return nil end
  return tenant, tenant .. ':' .. random
end

local function lane_key(class, tenant) return PREFIX .. 'lane:' .. class .. ':' .. tenant end
local function channel_key(job, choice) return PREFIX .. 'channel:' .. job.suffix .. ':' .. choice end
local function payload_key(job) return PREFIX .. 'payload:' .. job.suffix end
local function result_key(job) return PREFIX .. 'result:' .. job.suffix end
local function held_key(incarnation) return PREFIX .. 'held:' .. incarnation end
local function worker_key(incarnation) return PREFIX .. 'worker:' .. incarnation end
local function batch_key(batch) return PREFIX .. 'batch:' .. batch end
local function idem_key(key) return PREFIX .. 'idem:' .. key end

-- ---------------------------------------------------------------- what is written once, at the end

local counted, events, is_ringing = {}, {}, false

local function count(name, by) counted[name] = (counted[name] or 0) + by end
local function ring() is_ringing = true end

-- One change of a job's state for the history. A higher version of the same job wins there.
local function emit(kind, job, fields)
  events[#events + 1] = { kind, job.id, job.version, NOW, fields }
end

-- A foreign entry, or a key of the wrong type, noted for a person to look at: cut, and the newest so many.
local function to_garbage(where, what)
  call('XADD', GARBAGE, 'MAXLEN', '~', LIMITS.GARBAGE_MAXLEN, '*', 'where', where, 'what',
    string.sub(what, 1, LIMITS.GARBAGE_ENTRY_BYTES))
end

-- ---------------------------------------------------------------- jobs

local NUMBERS = {
  'version', 'class', 'prompt', 'max_tokens', 'choices', 'cost', 'bytes', 'epoch', 'attempt', 'failures', 'requeues',
  'charged', 'number', 'before', 'submitted', 'not_before', 'ttl', 'deadline', 'retry', 'started', 'scheduled',
  'first_token', 'ended', 'output',
}

-- The job as a table (absent and empty fields are nil), or nil and why: 'unknown', 'not a job id', 'wrong type'.
local function load_job(id)
  local tenant, suffix = names_of(id)
  if not tenant then return nil, 'not a job id' end
  local hash = PREFIX .. 'job:' .. suffix
  local flat = try('HGETALL', hash)
  if failed(flat) then return nil, 'wrong type' end
  if not flat[1] then return nil, 'unknown' end
  local job = {}
  for i = 1, #flat, 2 do
    if flat[i + 1] ~= '' then job[flat[i]] = flat[i + 1] end
  end
  for i = 1, #NUMBERS do
    local value = job[NUMBERS[i]]
    if value then job[NUMBERS[i]] = tonumber(value) end
  end
  if not (job.state and job.version and job.choices and job.cost and job.prompt and job.max_tokens and job.submitted) then
    return nil, 'not a job'
  end
  job.id, job.hash, job.tenant, job.suffix = id, hash, tenant, suffix
  return job
end

-- Move a job to another state, in the table of states.py, and raise its version.
local function enter(job, state)
  if not string.find(TRANSITIONS, ' ' .. job.state .. '>' .. state .. ' ', 1, true) then
    error('job ' .. job.id .. ' cannot go from ' .. job.state .. ' to ' .. state)
  end
  job.state = state
  job.version = job.version + 1
end

-- ---------------------------------------------------------------- leases

-- A lease is an array: owner ('' when given back), epoch, flag ('' or the state asked for), the owner before, 1 if the job
-- has deaths listed, then for each choice its offset and whether it ended: 0 no, 1 yes, 2 well (`done`).
local OWNER, EPOCH, FLAG, PREVIOUS, DEATHS, FIRST = 1, 2, 3, 4, 5, 6

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

-- Offset and end of all choices as text, `12:2,7:1`: how a job that has no lease any more remembers them.
local function offsets_of(lease)
  local offsets = {}
  for at = FIRST, #lease, 2 do offsets[#offsets + 1] = string.format('%d:%d', lease[at], lease[at + 1]) end
  return table.concat(offsets, ',')
end

-- A lease whose job is gone or is no job any more: nothing is left that could end.
local function forget_lease_of_nothing(id, lease, why)
  call('HDEL', LEASES, id)
  if lease[OWNER] ~= '' then
    call('HDEL', held_key(lease[OWNER]), id)
    count('running_jobs', -1)
  end
  to_garbage(LEASES, id .. ': ' .. why)
end

-- ---------------------------------------------------------------- lanes

-- A lane's numbers in `depth`: waiting jobs and tokens, ever added, ever taken. Read once, written once by `finish`.
local lanes = {}

local function open_lane(class, tenant)
  local name = class .. ':' .. tenant
  local lane = lanes[name]
  if lane then return lane end
  lane = { name = name, class = class, tenant = tenant, key = lane_key(class, tenant), is_changed = false }
  local found = call('TYPE', lane.key).ok
  lane.is_sound = found == 'stream' or found == 'none'
  local numbers = {}
  for number in string.gmatch(call('HGET', DEPTH, name) or '', '%d+') do numbers[#numbers + 1] = tonumber(number) end
  lane.jobs, lane.tokens = numbers[1] or 0, numbers[2] or 0
  lane.added, lane.added_tokens = numbers[3] or 0, numbers[4] or 0
  lane.taken, lane.taken_tokens = numbers[5] or 0, numbers[6] or 0
  lanes[name] = lane
  return lane
end

-- Virtual tokens of a tenant; the field `:time` holds those of the tenant that was served last.
local VIRTUAL_TIME = ':time'
local function served_of(tenant) return tonumber(call('HGET', SERVED, tenant) or '') or 0 end

-- A tenant that comes back is lifted to the least of those who wait: nobody saves up by staying away.
local function lift_served(class, tenant)
  local least = tonumber(call('ZRANGE', PREFIX .. 'ready:' .. class, 0, 0, 'WITHSCORES')[2] or '')
  local floor = least or served_of(VIRTUAL_TIME)
  if served_of(tenant) < floor then call('HSET', SERVED, tenant, floor) end
end

-- Charge a tenant (or, with a negative number, give it back) and move its lanes in every class where it waits.
local function charge(tenant, tokens)
  local weight = tonumber(SETTINGS['weight:' .. tenant]) or 1
  local served = math.max(0, served_of(tenant) + tokens / weight)
  call('HSET', SERVED, tenant, served)
  for class = 0, LIMITS.MAX_PRIORITY do
    call('ZADD', PREFIX .. 'ready:' .. class, 'XX', served, tenant)
  end
end

-- Where a lane stands in its class: least first. fair: virtual tokens; deadline: slack of its head, which orders like
-- deadline less the time its cost takes; fifo: submit time of its head.
local NO_DEADLINE = 9e15
local function score_of(lane, at, head)
  if lane.class == RETURNED or MODE == 'fifo' then return at end
  if MODE == 'fair' then return served_of(lane.tenant) end
  if not head or not head.deadline then return NO_DEADLINE end
  return head.deadline - head.cost * setting('ms_per_token', 0)
end

local function list_lane(lane, at, score)
  call('ZADD', PREFIX .. 'heads:' .. lane.class, at, lane.tenant)
  call('ZADD', PREFIX .. 'ready:' .. lane.class, score, lane.tenant)
end

local function unlist_lane(lane)
  call('ZREM', PREFIX .. 'heads:' .. lane.class, lane.tenant)
  call('ZREM', PREFIX .. 'ready:' .. lane.class, lane.tenant)
end

-- Put a job's one valid entry at the end of a lane; `at` is the time it is ordered by, and what was published must be
-- computed again like prompt. The caller writes the job (`write_place`).
local function add_entry(job, class, at, published)
  local lane = open_lane(class, job.tenant)
  local is_first = not lane.has_entries and not call('ZSCORE', PREFIX .. 'heads:' .. class, job.tenant)
  if is_first then
    if MODE == 'fair' and class ~= RETURNED then lift_served(class, job.tenant) end
    list_lane(lane, at, score_of(lane, at, job))
  end
  lane.has_entries = true
  job.lane = lane.name
  job.entry = call(
    'XADD', lane.key, '*', 'job', job.id, 'prompt', job.prompt + published, 'cost', job.cost, 'choices', job.choices,
    'at', at
  )
  lane.added = lane.added + 1
  lane.jobs = lane.jobs + 1
  job.number, job.before = lane.added, lane.added_tokens
  lane.added_tokens = lane.added_tokens + job.cost
  lane.tokens = lane.tokens + job.cost
  lane.is_changed = true
  ring()
end

-- Take a job's entry off its lane, when it has one. `finish` finds the lane's new head.
local function remove_entry(job, is_taken)
  local class, tenant = string.match(job.lane, '^([^:]+):(.+)$')
  local lane = open_lane(class, tenant)
  if lane.is_sound then call('XDEL', lane.key, job.entry) end
  lane.jobs = math.max(0, lane.jobs - 1)
  lane.tokens = math.max(0, lane.tokens - job.cost)
  if is_taken then
    lane.taken = lane.taken + 1
    lane.taken_tokens = lane.taken_tokens + job.cost
  end
  lane.is_changed, lane.has_lost = true, true
  job.entry, job.lane = nil, nil
end

local function head_time(entry)
  local fields = as_map(entry[2])
  return tonumber(fields.at) or NOW, fields.job
end

-- A lane that lost entries: point its class at the new head, or forget the lane when it is empty.
local function relist(lane)
  if not lane.is_sound then return unlist_lane(lane) end
  local first = call('XRANGE', lane.key, '-', '+', 'COUNT', 1)[1]
  if first then
    local at, id = head_time(first)
    local head = MODE == 'deadline' and id and load_job(id) or nil
    return list_lane(lane, at, score_of(lane, at, head))
  end
  call('DEL', lane.key)
  call('HDEL', DEPTH, lane.name)
  unlist_lane(lane)
  lane.is_changed = false
end

-- ---------------------------------------------------------------- waiting and running

-- Tokens a job will hold when it is admitted: what must be computed again, and what it may yet write, up to the reserve.
local RESERVE = setting('reserve_tokens', LIMITS.DEFAULT_RESERVE_TOKENS)
local function cost_of(job, published)
  local rest = math.max(0, job.max_tokens - math.floor(published / job.choices))
  return job.prompt + published + job.choices * math.min(rest, RESERVE)
end

local function count_waiting(job, by)
  count('waiting_jobs', by)
  count('waiting_tokens', by * job.cost)
  count('waiting_bytes', by * (job.bytes or 0))
end

-- Stop waiting, wherever it waits: on a lane, for its time, or among the suspects.
local function leave_waiting(job, is_taken)
  count_waiting(job, -1)
  if job.entry then return remove_entry(job, is_taken) end
  call('ZREM', SUSPECTS, job.id)
  call('ZREM', DELAYED, job.id)
end

local function add_timer(kind, job, at)
  call('ZADD', TIMERS, at, kind .. '|' .. job.id)
end

local function remove_timers(job)
  if not (job.not_before or job.ttl or job.deadline or job.retry) then return end
  local id = job.id
  call('ZREM', TIMERS, 'not_before|' .. id, 'ttl|' .. id, 'deadline|' .. id, 'retry|' .. id)
end

-- Where a queued job waits, as its hash tells.
local function write_place(job)
  call('HSET', job.hash, 'state', 'queued', 'version', job.version, 'cost', job.cost, 'entry', job.entry or '', 'lane',
    job.lane or '', 'number', job.number or 0, 'before', job.before or 0)
end

-- Let a lease go without ending the job: the owner's list forgets it, offsets stay.
local function let_go(job, lease)
  call('HDEL', held_key(lease[OWNER]), job.id)
  lease[PREVIOUS], lease[OWNER], lease[FLAG] = lease[OWNER], '', ''
  write_lease(job.id, lease)
end

-- A fresh entry with the submit time, in the class that is served first.
local function enqueue_again(job, lease)
  add_entry(job, RETURNED, job.submitted, published_tokens(lease))
  write_place(job)
end

-- Running -> queued: with a fresh entry at its submit time in the class that is served first, or among the suspects, or
-- (`retry_at`) without an entry until its time.
local function return_job(job, lease, why, retry_at)
  enter(job, 'queued')
  let_go(job, lease)
  count('running_jobs', -1)
  job.cost = cost_of(job, published_tokens(lease))
  count_waiting(job, 1)
  emit('returned', job, { why = why, epoch = lease[EPOCH] })
  if why == 'suspect' then
    call('ZADD', SUSPECTS, NOW, job.id)
    ring()
  elseif retry_at then
    call('HSET', job.hash, 'retry', retry_at)
    call('ZADD', DELAYED, 0, job.id)
    add_timer('retry', job, retry_at)
  else
    return enqueue_again(job, lease)
  end
  write_place(job)
end

-- ---------------------------------------------------------------- ends

-- Channel entry of an end that no worker wrote, as `encode_entry` would pack it: version, start, ids, text, time,
-- logprobs, end.
local function end_entry(offset, how)
  local finish = { state = how.state, error = how.error, error_code = how.error_code }
  return cmsgpack.pack({ 1, offset, {}, '', NOW, false, finish })
end

-- The end of one choice on its channel. Its id is the server's own wall against a second one.
local function write_end(job, lease, choice, state, packed)
  local at = FIRST + 2 * choice
  local id = string.format('%d-%d', lease[at], 1 + (job.requeues or 0))
  local added = try('XADD', channel_key(job, choice), id, 'e', packed)
  if failed(added) then to_garbage(channel_key(job, choice), added.err) end
  lease[at + 1] = state == 'done' and 2 or 1
end

local function close_channels(job, lease, how, keep_ms)
  for choice = 0, job.choices - 1 do
    if lease[FIRST + 2 * choice + 1] == 0 then
      write_end(job, lease, choice, how.state, end_entry(lease[FIRST + 2 * choice], how))
    end
    call('PEXPIRE', channel_key(job, choice), keep_ms)
  end
end

-- What a batch says when it is closed and all of it has ended: once.
local function complete_batch(batch, numbers)
  local ended = 0
  for _, state in ipairs({ 'done', 'failed', 'cancelled', 'expired' }) do ended = ended + (tonumber(numbers[state]) or 0) end
  if ended < (tonumber(numbers.total) or 0) then return end
  call('PEXPIRE', batch_key(batch), setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000))
  if numbers.closed ~= '1' or numbers.completed then return end
  call('HSET', batch_key(batch), 'completed', NOW)
  call('XADD', CALLBACKS, '*', 'kind', 'batch', 'id', batch, 'at', NOW, 'total', numbers.total or 0,
    'done', numbers.done or 0, 'failed', numbers.failed or 0, 'cancelled', numbers.cancelled or 0,
    'expired', numbers.expired or 0, 'url', numbers.url or '')
end

local function count_in_batch(job)
  if not job.batch then return end
  local key = batch_key(job.batch)
  if failed(try('HINCRBY', key, job.state, 1)) then return to_garbage(key, 'a batch of the wrong type') end
  complete_batch(job.batch, as_map(call('HGETALL', key)))
end

-- The key outlives the job by the stated time, and says what became of it even when the job is forgotten.
local function keep_idempotency(job)
  if not job.key then return end
  local value = job.id .. ' ' .. job.state .. ' ' .. (job.digest or '')
  call('SET', idem_key(job.key), value, 'PX', setting('idempotency_ttl_ms', LIMITS.IDEMPOTENCY_TTL_S * 1000))
end

local function expire_keys(job, keep_ms)
  call('PEXPIRE', job.hash, keep_ms)
  call('PEXPIRE', result_key(job), keep_ms)
  call('PEXPIRE', payload_key(job), keep_ms)
end

-- A failed job is kept whole, for a person to look at and requeue; the oldest makes room at the bound.
local function bury(job)
  call('ZADD', DEAD, NOW, job.id)
  if call('ZCARD', DEAD) <= setting('dead_set_max', LIMITS.DEAD_SET_MAX) then return end
  local oldest = call('ZPOPMIN', DEAD)[1]
  local forgotten = load_job(oldest)
  if forgotten then expire_keys(forgotten, setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000)) end
end

local function emit_end(job, lease, how)
  local fields = {
    state = job.state, reason = how.reason, error = how.error, error_code = how.error_code, epoch = job.epoch or 0,
    attempt = job.attempt or 0, incarnation = how.incarnation, record = how.record,
  }
  if how.result and SETTINGS.keep_results ~= '0' then
    -- A large one is read from its key: an outbox entry must stay small enough to travel.
    if #how.result <= LIMITS.MAX_CALL_BYTES then fields.result = how.result else fields.result_bytes = #how.result end
  end
  fields.result_bytes = fields.result_bytes or how.result_bytes
  emit('ended', job, fields)
  if job.callback then
    call('XADD', CALLBACKS, '*', 'kind', 'job', 'id', job.id, 'at', NOW, 'state', job.state, 'version', job.version,
      'error', how.error or '', 'batch', job.batch or '', 'spec', job.spec or '')
  end
end

-- Virtual tokens were charged with an estimate; the truth is known now.
local function settle(job, lease, how)
  if MODE ~= 'fair' or not job.charged then return end
  local true_tokens = job.prompt + (how.output_tokens or published_tokens(lease))
  if true_tokens ~= job.charged then charge(job.tenant, true_tokens - job.charged) end
end

-- Any of the four ends, from any state, with all that it means. `how`: state, reason, error, error_code; from a worker
-- also incarnation, result, record, output_tokens.
local function end_job(job, lease, how)
  local was_running = job.state == 'running'
  if was_running then count('running_jobs', -1) else leave_waiting(job, false) end
  enter(job, how.state)
  lease = lease or new_lease(job.choices)
  settle(job, lease, how)
  remove_timers(job)
  call('HDEL', LEASES, job.id)
  if lease[OWNER] ~= '' then call('HDEL', held_key(lease[OWNER]), job.id) end

  if how.state == 'cancelled' then how.error = job.asked or how.error end
  local is_dead = how.state == 'failed'
  local keep_ms = is_dead and LIMITS.DEAD_TTL_S * 1000 or setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000)
  close_channels(job, lease, how, is_dead and keep_ms or setting('channel_ttl_ms', LIMITS.CHANNEL_TTL_S * 1000))
  -- Parts that were written for an end that never came would be taken for the result.
  if how.result then call('SET', result_key(job), how.result)
  elseif not how.result_bytes then call('DEL', result_key(job)) end
  if not is_dead then call('DEL', payload_key(job)) end
  call('HSET', job.hash, 'state', job.state, 'version', job.version, 'ended', NOW, 'published', offsets_of(lease),
    'ended_by', (how.incarnation or '') .. ':' .. lease[EPOCH], 'reason', how.reason or '', 'error', how.error or '',
    'error_code', how.error_code or '', 'output', how.output_tokens or published_tokens(lease), 'entry', '',
    'lane', '')
  expire_keys(job, keep_ms)
  if is_dead then bury(job) end
  keep_idempotency(job)
  count(job.state, 1)
  emit_end(job, lease, how)
  count_in_batch(job)
end

-- What is asked of a running job: a flag, which its owner hears of with its next advance or beat. The first one stands.
local function flag(job, lease, state)
  if lease[FLAG] ~= '' then return end
  lease[FLAG] = state
  write_lease(job.id, lease)
end

local SAID = {
  cancelled = { error = 'The job was cancelled.', error_code = 'cancelled' },
  expired = { error = 'The job did not end before its deadline.', error_code = 'deadline' },
  unstarted = { error = 'The job waited longer than its time to live.', error_code = 'ttl' },
}

local function end_unheard(job, lease, state, said)
  end_job(job, lease, { state = state, error = said.error, error_code = said.error_code })
end

-- ---------------------------------------------------------------- the last act of every script

local function finish()
  for _, lane in pairs(lanes) do
    if lane.has_lost then relist(lane) end
    if lane.is_changed then
      call('HSET', DEPTH, lane.name, string.format('%d %d %d %d %d %d', lane.jobs, lane.tokens, lane.added,
        lane.added_tokens, lane.taken, lane.taken_tokens))
    end
  end
  for name, by in pairs(counted) do
    if by ~= 0 then call('HINCRBY', COUNTERS, name, by) end
  end
  if #events > 0 then call('XADD', OUTBOX, '*', 'e', cmsgpack.pack(events)) end
  if is_ringing then call('XADD', BELL, 'MAXLEN', '~', LIMITS.BELL_MAXLEN, '*', 'e', '1') end
end
