-- Requeue failed jobs of the dead set: each waits in its class and tenant from now on, and resumes after its last
-- token.
--
-- KEYS: config.
-- ARGV[1]: packed array of job ids.
-- Reply: for each 1, or 0 if it has not failed, its prompt has expired, or a newer job has its
--   idempotency key.
-- Reads: batch, depth, heads, idem, job, outbox, parked, ready, served, tenants.
-- Writes: batch, bell, channel, counters, dead, delayed, depth, garbage, heads, idem, job, lane, members, outbox,
--   payload, ready, result, served, tenants, timers.
-- Bound: LIMITS.SLICE_JOBS jobs, with LIMITS.MAX_CHOICES channels of each.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

-- Delete the old end and keep the tokens. Its id stays the last id of the stream, so the next end has a higher one.
local function reopen_channels(job, lease)
  for choice = 0, job.choices - 1 do
    local key, at = channel_key(job, choice), 2 * choice + 1
    if lease[at + 1] == 0 then
      try('XDEL', key, string.format('%d-%d', lease[at], 1 + job.requeues))
    end
    call('PERSIST', key)
  end
end

-- An expired batch is not recreated: it would have only one of its jobs.
local function reopen_batch(job)
  if not job.batch then return end
  local key = batch_key(job.batch)
  local total = try('HGET', key, 'total')
  if failed(total) or not total then return end
  try('HINCRBY', key, 'failed', -1)
  call('HDEL', key, 'completed')
  local deadline = tonumber(call('HGET', key, 'deadline') or '')
  if deadline and deadline > NOW then
    call('ZADD', TIMERS, deadline, 'batch|' .. job.batch)
  else
    call('HDEL', key, 'deadline')
  end
  call('PERSIST', key)
  join_members(job)
end

local function reopen_keys(job)
  call('PERSIST', payload_key(job))
  call('DEL', result_key(job))
  call('ZREM', DEAD, job.id)
  if job.key then call('SET', idem_key(job), job.id .. ' queued ' .. (job.digest or '')) end
  reopen_batch(job)
end

-- A deadline that has passed does not apply to a requeued job.
local function renew_timers(job)
  if job.deadline and job.deadline > NOW then
    add_timer('deadline', job, job.deadline)
  else
    job.deadline = nil
  end
  for _, name in ipairs({
    'ttl', 'not_before', 'retry', 'waits_since', 'deaths', 'ended', 'ended_by', 'error', 'error_code', 'reason',
    'asked', 'output',
  }) do job[name] = nil end
  job.failures = 0
end

-- Whether another job took the idempotency key, which expires before the dead set forgets the job: that one is the
-- request now.
local function has_lost_key(job)
  if not job.key then return false end
  local value = try('GET', idem_key(job))
  return failed(value) or value and string.sub(value, 1, #job.id + 1) ~= job.id .. ' '
end

local function requeue(id)
  local job = load_job(id)
  if not job or job.state ~= 'failed' or has_lost_key(job) then return 0 end
  if not open_lane(job.class, job.tenant).is_sound then return 0 end
  if call('TYPE', payload_key(job)).ok ~= 'string' then return 0 end
  local lease = leases.of_row(job, true)
  enter(job, 'queued')
  reopen_channels(job, lease)
  reopen_keys(job)
  renew_timers(job)
  job.published = offsets_of(lease)
  job.cost = cost_of(job, published_tokens(lease))
  count('failed', -1)
  count('requeued', 1)
  count_waiting(job, 1)
  enqueue(job, job.class, NOW, lease)
  job.requeues = job.requeues + 1
  save(job)
  emit('returned', job, { why = 'requeue', epoch = lease.epoch })
  return 1
end

local answers = {}
for i, id in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do answers[i] = requeue(id) end
finish()
return answers
