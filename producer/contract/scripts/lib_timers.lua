-- Timers that are due, at most a bite of them a call. Each member is removed directly after its effect.

local function end_expired(job, said)
  local lease = read_lease(job.id)
  if job.state == 'running' then
    if lease then flag(job, lease, 'expired') end
  elseif job.state == 'queued' then
    end_unheard(job, lease, 'expired', said)
  end
end

-- A job whose time has come gets its entry; until then it had none and counted as waiting.
local function make_due(job, class, at)
  if job.state ~= 'queued' or job.entry then return end
  call('ZREM', DELAYED, job.id)
  enqueue(job, class, at, read_lease(job.id))
end

local TIMER_EFFECTS = {
  not_before = function(job) make_due(job, job.class, math.max(job.submitted, job.not_before or 0)) end,
  retry = function(job) make_due(job, RETURNED, job.submitted) end,
  ttl = function(job)
    -- Time to live is for the wait before the first start: a job that was begun is worth finishing.
    if job.attempt == 0 then end_expired(job, SAID.unstarted) end
  end,
  deadline = function(job) end_expired(job, SAID.expired) end,
}

-- A batch whose deadline has passed takes no more jobs and ends in bites, one with each call that fires timers.
local num_left_to_expire = LIMITS.MAX_BITE
local function expire_batch(batch)
  if call('EXISTS', batch_key(batch)) == 0 then return end
  if not is_type(batch_key(batch), 'hash') then return to_garbage(batch_key(batch), 'a batch of the wrong type') end
  local num_ended, num_asked, has_more = 0, 0, true
  if num_left_to_expire > 0 then
    num_ended, num_asked, has_more = end_batch(batch, 'expired', SAID.batch_expired, num_left_to_expire)
  end
  num_left_to_expire = num_left_to_expire - num_ended - num_asked
  if has_more then call('ZADD', TIMERS, NOW + 1, 'batch|' .. batch) end
end

local function fire_timer(member)
  local kind, id = string.match(member, '^([a-z_]+)|(.+)$')
  if kind == 'batch' then return expire_batch(id) end
  local effect = kind and TIMER_EFFECTS[kind]
  if not effect then return to_garbage(TIMERS, member) end
  local job, why = load_job(id)
  if job then effect(job) elseif why ~= 'unknown' then to_garbage(TIMERS, member .. ': ' .. why) end
end

-- The bound of the dead set in time: its keys expire by themselves, its members here.
local function forget_old_dead()
  local old = call('ZRANGEBYSCORE', DEAD, '-inf', NOW - LIMITS.DEAD_TTL_S * 1000, 'LIMIT', 0, LIMITS.MAX_BITE)
  if #old > 0 then call('ZREM', DEAD, unpack(old)) end
end

local function fire_timers()
  local due = call('ZRANGEBYSCORE', TIMERS, '-inf', NOW, 'LIMIT', 0, LIMITS.MAX_BITE)
  for _, member in ipairs(due) do
    fire_timer(member)
    -- Its effect may have been to wait once more.
    local again = tonumber(call('ZSCORE', TIMERS, member) or '')
    if again and again <= NOW then call('ZREM', TIMERS, member) end
  end
  forget_old_dead()
  forget_served()
  return #due
end

local function next_timer()
  return tonumber(call('ZRANGE', TIMERS, 0, 0, 'WITHSCORES')[2] or '')
end
