-- Reclaim jobs of workers whose heartbeat has expired.

local reclaim  -- the names used outside: a script may have 200 locals

do

local function dead_workers()
  local dead, now = {}, beat_time()
  -- Each pull begins at others: jobs that fit no worker here must not hide those that do.
  local from = (request.number - 1) * LIMITS.MAX_DEAD_PER_PULL % math.max(1, call('ZCOUNT', ALIVE, '-inf', now))
  for _, incarnation in ipairs(call('ZRANGEBYSCORE', ALIVE, '-inf', now, 'LIMIT', from, LIMITS.MAX_DEAD_PER_PULL)) do
    local is_sound = is_type(held_key(incarnation), 'hash') and is_type(worker_key(incarnation), 'hash')
    if not is_sound then
      call('ZREM', ALIVE, incarnation)
      to_garbage(ALIVE, incarnation .. ': a key of it has the wrong type')
    elseif incarnation ~= ME then
      dead[#dead + 1] = incarnation
    end
  end
  return dead
end

local num_left = 0  -- jobs that this pull has left with their dead workers

-- If the slice has no room for the job, or one job is held already, it stays with the dead worker. So does a job that
-- is not a reason for a full worker to interrupt another.
local function move_to_me(job, lease, death)
  if request.over and job.class <= request.over then
    num_left = num_left + 1
    return
  end
  job.published = offsets_of(lease)
  job.cost = cost_of(job, published_tokens(lease))
  local need = need_of(job)
  local mark = 'r'
  if not fits(need) then
    if request.holds or need.cost > request.cache then
      num_left = num_left + 1
      return
    end
    mark, is_over = 'b', true
  end
  local payload = read_payload(job)
  if not payload then return give_up_payload(job, lease) end
  call('HDEL', held_key(death.incarnation), job.id)
  enter(job, 'queued')
  count('running_jobs', -1)
  local why = death.is_deregistered and 'farewell' or 'death'
  emit('returned', job, { why = why, epoch = lease.epoch, seen_ms = job.seen })
  job.previous, lease.flag = death.incarnation, ''
  start(job, lease, payload, need, mark)
end

local function reclaim_job(id, death)
  local job, why = load_running(id)
  if not job then return forget_lease_of_nothing(death.incarnation, id, why) end
  local lease = job.owner == death.incarnation and leases.held(job)
  if not lease then return call('HDEL', held_key(death.incarnation), id) end
  if lease.flag ~= '' then return end_without_worker(job, lease, lease.flag, END_REASONS[lease.flag]) end
  job.seen = death.seen
  if is_settled_by_death(job, lease, death) then return end
  local wait_ms = wait_for_worker(job, lease)
  if wait_ms then return return_job(job, lease, death.is_deregistered and 'farewell' or 'death', NOW + wait_ms) end
  move_to_me(job, lease, death)
end

-- Whether its process has ended, or must have: its heartbeat expired while nothing kept it from renewing it.
local function is_dead(incarnation)
  if is_reported(incarnation) then return true end
  local expires_in = tonumber(call('HGET', worker_key(incarnation), 'life') or '') or LIMITS.HEARTBEAT_LIFETIME_S * 1000
  return request.may_reclaim and has_been_up_for(expires_in + LIMITS.BEAT_EVERY_S * 1000)
end

-- Move jobs that fit; the dead worker leaves `alive` when it holds no more.
local function reclaim_from(incarnation, budget)
  if not is_dead(incarnation) then return 0 end
  local death = about_death(incarnation)
  local held, num_seen = leases.all_of(incarnation), 0
  local from = #held > budget and (request.number - 1) * LIMITS.SLICE_JOBS % #held or 0
  while num_seen < math.min(budget, #held) and not is_slice_full() do
    reclaim_job(held[(from + num_seen) % #held + 1][1], death)
    num_seen = num_seen + 1
  end
  -- What is no lease does not keep it there.
  if #held == 0 then call('DEL', held_key(incarnation)) end
  if call('EXISTS', held_key(incarnation)) == 0 then call('ZREM', ALIVE, incarnation) end
  return num_seen
end

function reclaim()
  if request.holds then return end
  local budget = LIMITS.SLICE_JOBS
  for _, incarnation in ipairs(dead_workers()) do
    if budget <= 0 or is_slice_full() then break end
    budget = budget - reclaim_from(incarnation, budget)
  end
  if budget <= 0 and num_left < LIMITS.SLICE_JOBS then has_more = true end
end

end
