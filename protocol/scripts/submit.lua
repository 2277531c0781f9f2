-- include: lib_submitted
-- Put jobs on their lanes: each with hash, payload, idempotency key, entry (or timer) and event, or not at all.
--
-- KEYS: config.
-- ARGV[1]: packed array of jobs, each an array in the order of `unpacked` below.
-- ARGV[2]: '1' for jobs that are submitted to be cancelled at once: bounds of waiting jobs do not hold for them.
-- Reply: for each job one of {'accepted', id, jobs ahead, tokens ahead}, {'duplicate', id, state}, {'conflict', id},
--   {'refused', reason, waiting jobs, waiting tokens, waiting bytes, limit, message}.
-- Reads: batch, callbacks, counters, depth, heads, idem, job, outbox, parked, ready, served, tenants.
-- Writes: batch, bell, counters, delayed, depth, garbage, heads, idem, job, lane, members, outbox, payload, ready,
--   served, tenants, timers.
-- Bound: LIMITS.MAX_JOBS_PER_CALL jobs.
--
-- The only script that a full server refuses: Redis accepts its first write only below maxmemory.

local wrong = wrong_key()
if wrong then return wrong end

local function unpacked(row)
  return rows.with_rare({
    id = row[1], spec = row[2], payload = row[3], seed = row[4], class = row[5], prompt = row[6], prompt_bytes = row[7],
    max_tokens = row[8], choices = row[9], digest = row[11], features = row[17], not_before_in = row[21],
    deadline_in = row[22], submitted = row[23], is_open = row[24] == 1,
    state = 'queued', version = 1, attempt = 0, epoch = 0, owner = '', number = 0, before = 0, failures = 0,
    requeues = 0, started = false, charged = false, scheduled = false, first_token = false, ended = false,
    entry = false, lane = false, tenant = false, suffix = false, cost = 0, bytes = 0, is_exact = false,
    keep_ms = false, packed = false,
  }, {
    key = row[10], batch = row[12], not_before = row[13], ttl = row[14], deadline = row[15], callback = row[16],
    custom_id = row[18], line = row[19], endpoint = row[20],
  })
end

-- Whether a row has the form that our clients pack; other programs may send any. All rows are checked before the first
-- write.
local MOST_BYTES = {
  spec = LIMITS.MAX_SPEC_BYTES, payload = LIMITS.MAX_PROMPT_BYTES, seed = 20, digest = LIMITS.MAX_DIGEST_BYTES,
  key = 4 * LIMITS.MAX_IDEMPOTENCY_KEY_CHARS, batch = LIMITS.MAX_BATCH_CHARS,
  custom_id = 4 * LIMITS.MAX_CUSTOM_ID_CHARS, endpoint = LIMITS.MAX_ENDPOINT_CHARS,
}
-- Made once: a call has up to hundreds of jobs.
local TEXTS, OPTIONAL_TEXTS = { 'spec', 'payload', 'seed', 'digest' }, { 'key', 'batch', 'custom_id', 'endpoint' }
local NUMBERS, OPTIONAL_NUMBERS = { 'prompt_bytes', 'max_tokens' },
  { 'prompt', 'not_before', 'ttl', 'deadline', 'callback', 'line', 'submitted', 'not_before_in', 'deadline_in' }

local function are_texts(job, names, are_optional)
  for i = 1, #names do
    local value = job[names[i]]
    if not (are_optional and value == nil or is_text(value, MOST_BYTES[names[i]])) then return false end
  end
  return true
end

local function are_numbers(job, names, are_optional)
  for i = 1, #names do
    local value = job[names[i]]
    if not (are_optional and value == nil or whole(value, MOST[names[i]] or LIMITS.MAX_NUMBER)) then return false end
  end
  return true
end

local function are_features(features)
  if features == nil then return true end
  if type(features) ~= 'table' then return false end
  for _, feature in ipairs(features) do
    if type(feature) ~= 'string' then return false end
  end
  return true
end

local function is_sound(job)
  return type(job.id) == 'string' and are_texts(job, TEXTS) and are_numbers(job, NUMBERS)
    and are_numbers(job, OPTIONAL_NUMBERS, true) and are_texts(job, OPTIONAL_TEXTS, true) and are_features(job.features)
    and string.find(job.seed, '^%d+$') and whole(job.class, MOST.class) and whole(job.choices, MOST.choices)
    and job.choices > 0
end

local new_jobs = {}
for i, row in ipairs(rows_of(ARGV[1], LIMITS.MAX_JOBS_PER_CALL, 'string', 'string')) do
  new_jobs[i] = unpacked(row)
  if not is_sound(new_jobs[i]) then return redis.error_reply('ERR not a new job: ' .. string.sub(row[1], 1, 200)) end
end

-- ---------------------------------------------------------------- bounds

-- The names used outside: a script may have 200 locals.
local waiting, refused, refusal_for_fullness, refusal_of_share, refusal_of_job, no_write, is_memory_full

do

local totals = call('HMGET', COUNTERS, 'waiting_jobs', 'waiting_tokens', 'waiting_bytes', 'outbox_bytes')
local function total(i) return tonumber(totals[i] or '') or 0 end
waiting = { jobs = total(1), tokens = total(2), bytes = total(3) }
-- Bounds apply to the whole queue: each partition has an equal part.
local NUM_PARTITIONS, UNITS = setting('partitions', 1), { 'jobs', 'tokens', 'bytes' }
local function bound(name, default)
  local of_queue = setting(name, default)
  return of_queue > 0 and math.max(1, math.floor(of_queue / NUM_PARTITIONS)) or 0
end
local BOUNDS = {
  jobs = bound('max_waiting_jobs', LIMITS.DEFAULT_MAX_WAITING_JOBS),
  tokens = bound('max_waiting_tokens', LIMITS.DEFAULT_MAX_WAITING_TOKENS),
  bytes = bound('max_waiting_bytes', LIMITS.DEFAULT_MAX_WAITING_BYTES),
}
local OUTBOX_BOUND = bound('max_outbox_entries', LIMITS.DEFAULT_MAX_OUTBOX_ENTRIES)
local OUTBOX_LENGTH, CALLBACKS_LENGTH = call('XLEN', OUTBOX), call('XLEN', CALLBACKS)
local OUTBOX_BYTES, OUTBOX_BYTES_BOUND = total(4), bound('max_outbox_bytes', LIMITS.DEFAULT_MAX_OUTBOX_BYTES)
local MAX_JOB_TOKENS = setting('max_job_tokens', math.huge)
-- `of`: the waiting jobs of the queue or of one tenant.
function refused(reason, most, sentence, of)
  of = of or waiting
  return { 'refused', reason, of.jobs, of.tokens, of.bytes, most, sentence }
end

local IS_BOUNDED = ARGV[2] ~= '1'
local function is_too_full(job)
  return IS_BOUNDED and (waiting.jobs >= BOUNDS.jobs or waiting.tokens + job.cost > BOUNDS.tokens
    or waiting.bytes + job.bytes > BOUNDS.bytes)
end

-- The first write of this script. It adds nothing, but Redis refuses it if it is full. Any other error (a replica, a
-- full disk) is the reply to the whole call.
local function has_no_memory()
  if is_memory_full == nil then
    no_write = failed(try('HINCRBY', COUNTERS, 'submitted', 0))
    -- Not a number, written by another user: `finish` starts from zero.
    if no_write and string.find(no_write, 'not an integer', 1, true) then no_write = nil end
    is_memory_full = no_write ~= nil and string.find(no_write, 'OOM ', 1, true) ~= nil
    if is_memory_full then no_write = nil end
  end
  return is_memory_full
end

function refusal_for_fullness(job)
  if has_no_memory() then return refused('full_memory', 0, 'the Redis server is at its maxmemory') end
  if no_write then return refused('no_write', 0, no_write) end
  if OUTBOX_LENGTH >= OUTBOX_BOUND then
    return refused('outbox_full', OUTBOX_BOUND, 'the history is not being written: its outbox is full')
  end
  if OUTBOX_LENGTH > 0 and OUTBOX_BYTES >= OUTBOX_BYTES_BOUND then
    return refused('outbox_full', OUTBOX_BYTES_BOUND,
      'the history is not being written: its outbox holds ' .. OUTBOX_BYTES .. ' bytes')
  end
  if OUTBOX_LENGTH + CALLBACKS_LENGTH >= OUTBOX_BOUND then
    return refused('outbox_full', OUTBOX_BOUND,
      'the callbacks are not being sent: ' .. CALLBACKS_LENGTH .. ' wait for `worker callbacks`')
  end
  if not is_too_full(job) then return nil end
  local more = { jobs = 1, tokens = job.cost, bytes = job.bytes }
  for _, unit in ipairs(UNITS) do
    if waiting[unit] + more[unit] > BOUNDS[unit] then
      local where = NUM_PARTITIONS > 1 and 'this partition of the queue' or 'the queue'
      local sentence = string.format('%s holds %d %s and takes %d', where, waiting[unit], unit, BOUNDS[unit])
      return refused('full_' .. unit, BOUNDS[unit], sentence)
    end
  end
end

local SHARE_PERCENT = math.min(100, setting('tenant_share_percent', LIMITS.DEFAULT_TENANT_SHARE_PERCENT))
local num_known  -- tenants that have used the queue lately
local function is_alone(held)
  num_known = num_known or try('HLEN', TENANTS)
  return failed(num_known) or num_known <= (held.is_known and 1 or 0)
end

local function share_of(held, unit)
  return math.floor((BOUNDS[unit] - math.max(0, waiting[unit] - held[unit])) * SHARE_PERCENT / 100)
end

-- A tenant may use its share of the room that the others leave, so that there is always room for a new tenant. It may
-- use all of it while no other has used the queue lately, and have one job in any case.
function refusal_of_share(job)
  local held = waiting_of(job.tenant)
  -- Another user may have written the count: no tenant holds more than the queue.
  for _, unit in ipairs(UNITS) do held[unit] = math.min(held[unit], waiting[unit]) end
  if not IS_BOUNDED or SHARE_PERCENT >= 100 or held.jobs == 0 or is_alone(held) then return nil end
  if held.jobs + 1 <= share_of(held, 'jobs') and held.tokens + job.cost <= share_of(held, 'tokens')
    and held.bytes + job.bytes <= share_of(held, 'bytes') then
    return nil
  end
  local more = { jobs = 1, tokens = job.cost, bytes = job.bytes }
  for _, unit in ipairs(UNITS) do
    local most = share_of(held, unit)
    if held[unit] + more[unit] > most then
      local sentence = string.format('tenant %s has %d %s waiting and may have %d now: '
        .. '%d %% of what other tenants leave of the %d that the queue takes',
        job.tenant, held[unit], unit, most, SHARE_PERCENT, BOUNDS[unit])
      return refused('tenant_full', most, sentence, held)
    end
  end
end

local function lacks_feature(job)
  -- Before its first worker, a queue states no features and accepts every job.
  if not job.features or not SETTINGS.features then return nil end
  for _, feature in ipairs(job.features) do
    if not string.find(',' .. (SETTINGS.features or '') .. ',', ',' .. feature .. ',', 1, true) then return feature end
  end
end

-- A job that states no length gets what fits after its prompt.
local function refusal_of_length(job)
  if not job.is_exact or job.prompt + (job.is_open and 1 or job.max_tokens) <= MAX_JOB_TOKENS then return nil end
  if job.is_open then
    return refused('too_large', MAX_JOB_TOKENS, string.format(
      'prompt is %d tokens; a job here may have %d, its output included', job.prompt, MAX_JOB_TOKENS))
  end
  return refused('too_large', MAX_JOB_TOKENS, string.format(
    'prompt (%d tokens) and max_tokens (%d) are %d; a job here may have %d', job.prompt, job.max_tokens,
    job.prompt + job.max_tokens, MAX_JOB_TOKENS))
end

function refusal_of_job(job)
  local too_long = refusal_of_length(job)
  if too_long then return too_long end
  local feature = lacks_feature(job)
  if feature then return refused('feature', 0, 'no worker of this queue offers ' .. feature) end
end

end

-- ---------------------------------------------------------------- duplicates

local function seen_by_id(job)
  local seen, why = load_job(job.id)
  if not seen and why == 'unknown' then return nil end
  if not seen then return refused('wrong_type', 0, row_key(job) .. ' is not a job') end
  if seen.digest ~= job.digest then return { 'conflict', job.id } end
  return { 'duplicate', job.id, seen.state }
end

local function seen_by_key(job)
  if not job.key then return nil end
  local value = try('GET', idem_key(job))
  if failed(value) then return refused('wrong_type', 0, idem_key(job) .. ' has a different type') end
  if not value then return nil end
  local id, state, digest = string.match(value, '^(%S+) (%S+) (.*)$')
  if digest ~= job.digest then return { 'conflict', id or '' } end
  local tenant, suffix = names_of(id)
  -- The user may have written any id. An error here would leave earlier jobs of the call accepted without an answer.
  local now = tenant == job.tenant and load_job(id)
  return { 'duplicate', id, now and now.state or state }
end

-- ---------------------------------------------------------------- accepting a job

local BYTES_PER_TOKEN = setting('bytes_per_token', LIMITS.DEFAULT_BYTES_PER_TOKEN)
local function prepare(job)
  job.is_exact = job.prompt ~= nil
  job.prompt = job.prompt or math.min(LIMITS.MAX_ROW_NUMBER, math.ceil(job.prompt_bytes / BYTES_PER_TOKEN))
  job.cost = cost_of(job, 0)
  job.bytes = #job.payload + #job.spec
  job.submitted = math.min(job.submitted or NOW, NOW)
  local rare = job.rare
  rare.ttl = from_now(rare.ttl)
  rare.not_before = from_now(job.not_before_in) or rare.not_before
  rare.deadline = from_now(job.deadline_in) or rare.deadline
end

local function refusal_of_keys(job)
  if not open_lane(job.class, job.tenant).is_sound then
    return refused('wrong_type', 0, lane_key(job.class, job.tenant) .. ' has a different type')
  end
  if not job.batch then return nil end
  local closed = try('HGET', batch_key(job.batch), 'closed')
  if failed(closed) then return refused('wrong_type', 0, batch_key(job.batch) .. ' has a different type') end
  if closed == '1' then return refused('batch_closed', 0, 'the batch ' .. job.batch .. ' is closed') end
end

local function write_timers(job)
  if job.not_before then add_timer('not_before', job, job.not_before) end
  if job.ttl then add_timer('ttl', job, job.ttl) end
  if job.deadline then add_timer('deadline', job, job.deadline) end
end

local function join_batch(job)
  if not job.batch then return end
  local total = try('HINCRBY', batch_key(job.batch), 'total', 1)
  if failed(total) then call('HSET', batch_key(job.batch), 'total', 1) end
  if total == 1 then call('HSET', batch_key(job.batch), 'began', NOW) end
  call('PERSIST', batch_key(job.batch))
  join_members(job)
end

local function accept(job)
  if job.not_before and job.not_before > NOW then
    call('ZADD', DELAYED, 0, job.id)
  else
    job.not_before = nil
    if not add_entry(job, job.class, NOW) then
      return refused('wrong_type', 0, lane_key(job.class, job.tenant) .. ' takes no more entries')
    end
  end
  -- Before the row: a call that failed in between would leave a job without a prompt.
  call('SET', payload_key(job), job.payload)
  save(job)
  if job.key then call('SET', idem_key(job), job.id .. ' queued ' .. job.digest) end
  write_timers(job)
  count_waiting(job, 1)
  count('submitted', 1)
  waiting.jobs, waiting.tokens, waiting.bytes = waiting.jobs + 1, waiting.tokens + job.cost, waiting.bytes + job.bytes
  emit('submitted', job, submitted_fields(job, job.payload))
  if not job.entry then return { 'accepted', job.id, 0, 0 } end
  local lane = open_lane(job.class, job.tenant)
  return { 'accepted', job.id, math.max(0, job.number - 1 - lane.taken), math.max(0, job.before - lane.taken_tokens) }
end

-- The parts of the id of a job of this partition, in the form that clients write; nil for any other.
local function own_names_of(id)
  local tenant, suffix = names_of(id)
  local is_own = tenant and #tenant <= LIMITS.MAX_TENANT_CHARS and #suffix - #tenant - 1 <= LIMITS.MAX_JOB_NAME_CHARS
  if is_own then return tenant, suffix end
end

-- The first refusal because of a limit: all later new jobs get the same, which keeps the order. Likewise of each
-- tenant.
local full, full_of = nil, {}

local function answer(job)
  job.tenant, job.suffix = own_names_of(job.id)
  if not job.tenant then return refused('wrong_type', 0, 'not a job id: ' .. job.id) end
  prepare(job)
  local seen = seen_by_id(job) or seen_by_key(job)
  if seen then return seen end
  if full then return full end
  local no = refusal_of_job(job) or refusal_of_keys(job)
  if no then return no end
  full = refusal_for_fullness(job)
  if full then
    -- From now on, the others leave room for it.
    if not is_memory_full then waiting_of(job.tenant).is_changed = true end
    return full
  end
  full_of[job.tenant] = full_of[job.tenant] or refusal_of_share(job)
  return full_of[job.tenant] or accept(job)
end

local answers = {}
for i, job in ipairs(new_jobs) do answers[i] = answer(job) end
-- A batch counts only jobs that are there.
rows.write()
for i, job in ipairs(new_jobs) do
  if answers[i][1] == 'accepted' then join_batch(job) end
end
-- Redis 6.2 puts the position in the script before the error code.
if no_write then return redis.error_reply(string.match(no_write, '%u%u%u+ .*') or no_write) end
finish()
return answers
