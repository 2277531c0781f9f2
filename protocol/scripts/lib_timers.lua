-- Fire due timers, one slice per call, the most urgent first. Each member is removed directly after its effect.

local fire_timers  -- the name used outside

do

local function end_expired(job, reason)
  local lease = leases.of(job)
  if job.state == 'running' then
    if lease then stop(job, lease, 'expired', reason) end
  elseif job.state == 'queued' then
    end_without_worker(job, lease, 'expired', reason)
  end
end

-- Give a job its entry when it is due. Until then it has none, and counts as waiting.
local function make_due(job, class, at)
  if job.state ~= 'queued' or job.entry then return end
  call('ZREM', DELAYED, job.id)
  enqueue(job, class, at, leases.of_row(job))
end

-- When a job's timer is due, by its own hash: the set of timers is shared, so another user may have added or moved one.
-- One that looks at a flagged job may always do so.
local function due_at(job, kind)
  if kind == 'stop' then return 0 end
  local fields = { not_before = job.not_before, retry = job.retry, ttl = job.ttl, deadline = job.deadline }
  return fields[kind]
end

-- A job that was never started waits in its own class.
local function make_due_first(job) make_due(job, job.class, math.max(job.submitted, job.not_before or 0)) end

local TIMER_EFFECTS = {
  not_before = make_due_first,
  retry = function(job)
    if job.attempt == 0 then make_due_first(job) else make_due(job, RETURNED, job.submitted) end
  end,
  ttl = function(job)
    -- The time to live covers the wait before the first start only.
    if job.attempt == 0 then end_expired(job, END_REASONS.unstarted) end
  end,
  deadline = function(job) end_expired(job, END_REASONS.expired) end,
  stop = function(job)
    local lease = job.state == 'running' and leases.held(job)
    if lease and lease.flag ~= '' then stop(job, lease) end
  end,
}

-- A batch past its deadline accepts no more jobs and ends in slices, one per call that fires timers.
local num_left_to_expire = LIMITS.SLICE_JOBS
local function expire_batch(batch)
  if call('EXISTS', batch_key(batch)) == 0 then return end
  if not is_type(batch_key(batch), 'hash') then return to_garbage(batch_key(batch), 'a batch of the wrong type') end
  local about = call('HMGET', batch_key(batch), 'deadline', 'expiring')
  local due = whole(about[1], LIMITS.MAX_NUMBER)
  if not due then return to_garbage(TIMERS, 'batch|' .. batch) end
  -- The clock may have stepped back since the first slice.
  if due > NOW and about[2] ~= '1' then return call('ZADD', TIMERS, due, 'batch|' .. batch) end
  local num_ended, num_asked, has_more = 0, 0, true
  if num_left_to_expire > 0 then
    num_ended, num_asked, has_more = end_batch(batch, 'expired', END_REASONS.batch_expired, num_left_to_expire)
  end
  num_left_to_expire = num_left_to_expire - num_ended - num_asked
  if not has_more then return end
  call('HSET', batch_key(batch), 'expiring', 1)
  call('ZADD', TIMERS, NOW + 1, 'batch|' .. batch)
end

local function fire_timer(member)
  local kind, id = string.match(member, '^([a-z_]+)|(.+)$')
  if kind == 'batch' then return expire_batch(id) end
  local effect = kind and TIMER_EFFECTS[kind]
  if not effect then return to_garbage(TIMERS, member) end
  local job, why = load_job(id)
  local due = job and due_at(job, kind)
  if due and due > NOW then
    -- It fires too early: put it back to its own time.
    call('ZADD', TIMERS, due, member)
  elseif due then
    effect(job)
  elseif job then
    to_garbage(TIMERS, member)
  elseif why ~= 'unknown' then to_garbage(TIMERS, member .. ': ' .. why) end
end

-- Remove old members of the dead set; the keys of their jobs expire by themselves.
local function forget_old_dead()
  local old = call('ZRANGEBYSCORE', DEAD, '-inf', NOW - LIMITS.DEAD_TTL_S * 1000, 'LIMIT', 0, LIMITS.SLICE_JOBS)
  if #old > 0 then call('ZREM', DEAD, unpack(old)) end
end

-- ---------------------------------------------------------------- many due timers

-- Due timers that one call does not fire are listed by urgency, with scores below 0: a timer takes effect by its job's
-- own time, so the score of a due one only orders it.
local SORTED_MS = 1e13

-- First what stops running jobs, then what makes jobs ready, by class, then the ends of waiting jobs, which no pull
-- starts.
local function urgency_of(member)
  local kind, id = string.match(member, '^([a-z_]+)|(.+)$')
  if kind == 'batch' then return LIMITS.MAX_PRIORITY + 2 end
  local suffix = kind and kind ~= 'ttl' and select(2, names_of(id))
  local state, class
  if suffix then state, class = state_and_class(suffix) end
  if not state then return 0 end
  if kind == 'deadline' or kind == 'stop' then return state == 'running' and LIMITS.MAX_PRIORITY + 2 or 0 end
  return 1 + class
end

local function sort_due()
  local listed = call('ZRANGEBYSCORE', TIMERS, 0, NOW, 'WITHSCORES', 'LIMIT', 0, LIMITS.SORTED_TIMERS)
  if #listed == 0 then return end
  local sorted = {}
  for i = 1, #listed, 2 do
    sorted[i] = tonumber(listed[i + 1]) - SORTED_MS - urgency_of(listed[i]) * LIMITS.TIMER_STEP_MS
    sorted[i + 1] = listed[i]
  end
  call('ZADD', TIMERS, unpack(sorted))
end

local function first_due(most) return call('ZRANGEBYSCORE', TIMERS, '-inf', NOW, 'LIMIT', 0, most) end

-- End a job whose own time has passed, however many timers are due.
local function end_overdue(id)
  local job = load_job(id)
  for _, kind in ipairs({ 'ttl', 'deadline', 'stop' }) do
    local due = job and due_at(job, kind)
    if due and due <= NOW then TIMER_EFFECTS[kind](job) end
  end
end

-- `overdue`: ids of jobs that are looked at first. Returns how many timers fired, and whether more are due.
function fire_timers(overdue)
  for _, id in ipairs(overdue or {}) do
    if not slice.is_spent() then end_overdue(id) end
  end
  local due = first_due(LIMITS.SLICE_JOBS + 1)
  local has_more = #due > LIMITS.SLICE_JOBS
  if has_more then
    sort_due()
    due = first_due(LIMITS.SLICE_JOBS)
  end
  local num_fired = 0
  for _, member in ipairs(due) do
    if slice.is_spent() then break end
    num_fired = num_fired + 1
    fire_timer(member)
    -- The effect may have set the timer again.
    local again = tonumber(call('ZSCORE', TIMERS, member) or '')
    if again and again <= NOW then call('ZREM', TIMERS, member) end
  end
  forget_old_dead()
  forget_served()
  return num_fired, has_more or num_fired < #due
end

end
