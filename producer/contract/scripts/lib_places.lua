-- Where a job is when it does not run, and how it gets there: on a lane, not due, or among the suspects.

-- Tokens a job will hold when it is admitted: what must be computed again, and what it may yet write, up to the
-- reserve.
local RESERVE = setting('reserve_tokens', LIMITS.DEFAULT_RESERVE_TOKENS)
local function cost_of(job, published)
  local rest = math.max(0, job.max_tokens - math.floor(published / job.choices))
  return job.prompt + published + job.choices * math.min(rest, RESERVE)
end

local function count_waiting(job, by)
  count('waiting_jobs', by)
  count('waiting_tokens', by * job.cost)
  count('waiting_bytes', by * job.bytes)
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
    job.lane or '', 'number', job.number, 'before', job.before)
end

-- Let a lease go without ending the job: the owner's list forgets it, offsets stay.
local function let_go(job, lease)
  call('HDEL', held_key(lease[OWNER]), job.id)
  lease[PREVIOUS], lease[OWNER], lease[FLAG] = lease[OWNER], '', ''
  write_lease(job.id, lease)
end

local function wait_until(job, at)
  call('HSET', job.hash, 'retry', at)
  call('ZADD', DELAYED, 0, job.id)
  add_timer('retry', job, at)
end

-- An entry on a lane. Where a foreign key stands in its place, the job waits for a person to take that away.
local function enqueue(job, class, at, lease)
  local lane = open_lane(class, job.tenant)
  if lane.is_sound then
    add_entry(job, class, at, published_tokens(lease))
  else
    to_garbage(lane.key, 'a foreign key where a lane should be; jobs wait for it to go')
    wait_until(job, NOW + LIMITS.FOREIGN_LANE_WAIT_S * 1000)
  end
  write_place(job)
end

-- With its submit time, in the class that is served first.
local function enqueue_again(job, lease) enqueue(job, RETURNED, job.submitted, lease) end

-- Running -> queued: with a fresh entry at its submit time in the class that is served first, or among the suspects, or
-- (`retry_at`) without an entry until its time.
local function return_job(job, lease, why, retry_at)
  enter(job, 'queued')
  let_go(job, lease)
  count('running_jobs', -1)
  job.cost = cost_of(job, published_tokens(lease))
  count_waiting(job, 1)
  local is_retry = why == 'retry'
  emit('returned', job, {
    why = why, epoch = lease[EPOCH], error = is_retry and job.error or nil,
    error_code = is_retry and job.error_code or nil,
  })
  if why == 'suspect' then
    call('ZADD', SUSPECTS, NOW, job.id)
    ring()
  elseif retry_at then
    wait_until(job, retry_at)
  else
    return enqueue_again(job, lease)
  end
  write_place(job)
end
