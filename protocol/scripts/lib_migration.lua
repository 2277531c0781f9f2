-- Move a job or a batch from keys of format 1 to those of the present one. Each is moved whole in one call, or not at
-- all.

local move_job, move_batch  -- the names used outside: a script may have 200 locals

do

local IDEMPOTENCY_MS = setting('idempotency_ttl_ms', LIMITS.IDEMPOTENCY_TTL_S * 1000)

-- RENAME keeps the time to live. There may be no such key; after any other error nothing may be deleted.
local function rename(...)
  local name = table.concat({ ... }, ':')
  local err = failed(try('RENAME', earlier.PREFIX .. name, PREFIX .. name))
  if err and not string.find(err, 'no such key', 1, true) then error(err) end
end

local function rename_keys(job)
  for _, kind in ipairs({ 'payload', 'result', 'readers' }) do rename(kind, job.suffix) end
  local num_channels = (job.attempt > 0 or job.published) and job.choices or 1
  for choice = 0, num_channels - 1 do rename('channel', job.suffix, choice) end
  slice.num_channels = slice.num_channels + num_channels
end

-- The earlier key stays for a while: a client of format 1 that submits the request again learns that it is known. A key
-- that has expired may be another request's by now.
local function copy_idempotency(job)
  if not job.key then return end
  local from = earlier.PREFIX .. 'idem:' .. job.tenant .. ':' .. job.key
  local known = earlier.unless_foreign('GET', from)
  if not known or string.sub(known, 1, #job.id + 1) ~= job.id .. ' ' then return end
  local keep_ms = call('PTTL', from)
  if keep_ms < 0 then call('PEXPIRE', from, IDEMPOTENCY_MS) end
  if keep_ms > 0 then
    call('SET', idem_key(job), known, 'PX', keep_ms, 'NX')
  else
    call('SET', idem_key(job), known, 'NX')
  end
end

-- ---------------------------------------------------------------- batches

local NUMBERS_OF_BATCH, TEXTS_OF_BATCH = { 'total', 'done', 'failed', 'cancelled', 'expired' },
  { 'closed', 'completed', 'url', 'deadline', 'began', 'expiring' }
local has_moved = {}

-- Add the numbers of a batch to those of the present format. It may be called again: jobs that end in the earlier
-- format are counted there anew.
function move_batch(batch)
  local from, to = earlier.key('batch', batch), batch_key(batch)
  if has_moved[batch] or call('EXISTS', from) == 0 then return false end
  has_moved[batch] = true
  if not is_type(from, 'hash') or not is_type(to, 'hash') then
    to_garbage(from, 'a batch of the wrong type')
    return false
  end
  for _, name in ipairs(NUMBERS_OF_BATCH) do
    local number = whole(call('HGET', from, name), LIMITS.MAX_NUMBER)
    if number and failed(try('HINCRBY', to, name, number)) then call('HSET', to, name, number) end
  end
  for _, name in ipairs(TEXTS_OF_BATCH) do
    local text = call('HGET', from, name)
    if text then call('HSETNX', to, name, text) end
  end
  local deadline = whole(call('HGET', from, 'deadline'), LIMITS.MAX_NUMBER)
  if deadline and call('HEXISTS', to, 'completed') == 0 then call('ZADD', TIMERS, deadline, 'batch|' .. batch) end
  try('ZREM', earlier.key('timers'), 'batch|' .. batch)
  call('DEL', from)
  call('PERSIST', to)
  look_at_batch(batch)
  return true
end

-- ---------------------------------------------------------------- jobs

local function resume(job, lease)
  if not lease then return end
  job.published, job.epoch = lease.published, math.max(job.epoch, lease.epoch)
  if lease.previous ~= '' then job.previous = lease.previous end
end

local function add_timers(job)
  if job.ttl and job.attempt == 0 then add_timer('ttl', job, job.ttl) end
  if job.deadline then add_timer('deadline', job, job.deadline) end
end

-- `was`: where it waited in the earlier format.
local function wait_as_before(job, was)
  count_waiting(job, 1)
  if was.at then
    enqueue(job, was.is_returned and RETURNED or job.class, was.at)
  elseif was.suspect_at then
    call('ZADD', SUSPECTS, was.suspect_at, job.id)
    notify()
  elseif job.retry or job.not_before then
    call('ZADD', DELAYED, 0, job.id)
    if job.retry then add_timer('retry', job, job.retry) else add_timer('not_before', job, job.not_before) end
  else
    enqueue(job, job.class, job.submitted)
  end
  add_timers(job)
  save(job)
end

local function place_of_queued(job, place)
  local suspect_at = earlier.unless_foreign('ZSCORE', earlier.key('suspects'), job.id)
  return {
    at = place.entry and (place.at or earlier.time_of(place.lane, place.entry) or job.submitted),
    is_returned = string.sub(place.lane or '', 1, #RETURNED) == RETURNED,
    suspect_at = suspect_at and time_in(suspect_at) or nil,
  }
end

local function join(job)
  count('submitted', 1)
  rename_keys(job)
  copy_idempotency(job)
  if not job.batch then return end
  move_batch(job.batch)
  if job.state ~= 'queued' then return end
  local key = members_key(job.batch)
  if not earlier.unless_foreign('ZADD', key, 0, job.id) then to_garbage(key, 'members of a batch of the wrong type') end
end

-- Whether a worker of the earlier format runs a job.
local function is_run(job, lease)
  return job.state == 'running' and lease and lease.owner ~= '' and not earlier.is_gone(lease.owner, job.started or nil)
end

local function move_queued(job, place)
  local lease, was = earlier.lease(job), place_of_queued(job, place)
  earlier.forget(job, place, lease, IDEMPOTENCY_MS)
  resume(job, lease)
  join(job)
  wait_as_before(job, was)
  return 'waiting'
end

-- A running job waits again if its owner has ended: no other worker of its format may live.
local function move_running(job, place)
  local lease = earlier.lease(job)
  if is_run(job, lease) then return 'running' end
  earlier.forget(job, place, lease, IDEMPOTENCY_MS)
  enter(job, 'queued')
  resume(job, lease)
  if lease and lease.owner ~= '' then job.previous = lease.owner end
  job.cost = cost_of(job, published_tokens(leases.of_row(job)))
  join(job)
  emit('returned', job, { why = 'death', epoch = job.epoch })
  wait_as_before(job, { at = job.submitted, is_returned = true })
  if lease and lease.flag ~= '' then
    end_without_worker(job, leases.of_row(job), lease.flag, END_REASONS[lease.flag])
  end
  return 'waiting'
end

local function move_ended(job, place)
  local kept_ms = call('PTTL', earlier.key('job', job.suffix))
  local keep_ms = kept_ms > 0 and kept_ms or setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000)
  local dead_at = earlier.unless_foreign('ZSCORE', earlier.key('dead'), job.id)
  earlier.forget(job, place, nil, keep_ms)
  join(job)
  count(job.state, 1)
  if dead_at then call('ZADD', DEAD, dead_at, job.id) end
  save(job, keep_ms)
  return 'ended'
end

-- A client of the present format has submitted the same job again: that one stays. Or a call failed after it had
-- written the job, and before it had deleted the prompt of one that it ended.
local function drop_duplicate(job, place, present)
  local lease = earlier.lease(job)
  if is_run(job, lease) then return 'running' end
  if job.batch then
    move_batch(job.batch)
    try('HINCRBY', batch_key(job.batch), 'total', -1)
    if job.ended then try('HINCRBY', batch_key(job.batch), job.state, -1) end
    look_at_batch(job.batch)
  end
  earlier.forget(job, place, lease, IDEMPOTENCY_MS)
  for _, kind in ipairs({ 'payload', 'result', 'readers' }) do call('DEL', earlier.key(kind, job.suffix)) end
  for choice = 0, job.choices - 1 do call('DEL', earlier.key('channel', job.suffix, choice)) end
  if present.ended and present.state ~= 'failed' then call('DEL', payload_key(present)) end
  return 'duplicate'
end

local MOVES = { queued = move_queued, running = move_running }

-- Move a job; return 'waiting' or 'ended', 'running' if its owner lives, 'duplicate' if the queue has the job already,
-- 'taken' if another job has its id, 'unknown' or 'foreign'. `at`: the time of its entry, if the caller knows it.
function move_job(id, at)
  local job, place = earlier.load(id)
  if not job then
    earlier.forget_member(id)
    return place == 'unknown' and place or 'foreign'
  end
  if call('EXISTS', row_key(job)) == 1 then
    local present = load_job(id)
    return present and present.digest == job.digest and drop_duplicate(job, place, present) or 'taken'
  end
  place.at = at
  return (MOVES[job.state] or move_ended)(job, place)
end

end
