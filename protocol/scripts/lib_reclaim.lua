-- Return the jobs of workers whose heartbeat has expired.

local reclaim  -- the name used outside: a script may have 200 locals

do

-- Whether its process has ended, or must have: its heartbeat expired while nothing kept it from renewing it.
local function is_dead(incarnation, may_declare)
  local about = call('HMGET', worker_key(incarnation), 'reported', 'farewell', 'life')
  if about[1] == '1' or about[2] == '1' then return true end
  local expires_in = tonumber(about[3] or '') or LIMITS.HEARTBEAT_LIFETIME_S * 1000
  return may_declare and has_been_up_for(expires_in + LIMITS.BEAT_EVERY_S * 1000)
end

-- The dead that this call looks at, and whether more have expired. Those that may not be declared dead must not hide
-- others: each call begins at other ones.
local function dead_workers(me, number, now, may_declare)
  local dead, most = {}, LIMITS.MAX_DEAD_PER_CALL
  local num_expired = call('ZCOUNT', ALIVE, '-inf', now)
  local from = num_expired > LIMITS.SLICE_JOBS and number * LIMITS.SLICE_JOBS % num_expired or 0
  for _, incarnation in ipairs(call('ZRANGEBYSCORE', ALIVE, '-inf', now, 'LIMIT', from, LIMITS.SLICE_JOBS)) do
    local is_sound = is_type(held_key(incarnation), 'hash') and is_type(worker_key(incarnation), 'hash')
    if not is_sound then
      call('ZREM', ALIVE, incarnation)
      to_garbage(ALIVE, incarnation .. ': a key of it has the wrong type')
    elseif incarnation ~= me and is_dead(incarnation, may_declare) then
      if #dead == most then return dead, true end
      dead[#dead + 1] = incarnation
    end
  end
  return dead, false
end

local function reclaim_job(id, lease, death)
  local job, why = load_running(id)
  if not job then return forget_lease_of_nothing(death.incarnation, id, why) end
  if job.owner ~= death.incarnation then return call('HDEL', held_key(death.incarnation), id) end
  if lease.flag ~= '' then return end_without_worker(job, lease, lease.flag, END_REASONS[lease.flag]) end
  job.seen = death.seen
  if is_settled_by_death(job, lease, death) then return end
  return_job(job, lease, death.is_deregistered and 'farewell' or 'death')
end

-- The dead worker leaves `alive` when it holds no more. Returns how many of its jobs were looked at.
local function reclaim_from(incarnation, budget)
  local death, held = about_death(incarnation), leases.all_of(incarnation)
  local ids, num_seen = {}, 0
  for i = 1, math.min(budget, #held) do ids[i] = held[i][1] end
  load_jobs(ids)
  while num_seen < #ids and not slice.is_spent() do
    num_seen = num_seen + 1
    reclaim_job(held[num_seen][1], held[num_seen][2], death)
  end
  -- What is no lease does not keep it there.
  if #held == 0 then call('DEL', held_key(incarnation)) end
  if call('EXISTS', held_key(incarnation)) == 0 then call('ZREM', ALIVE, incarnation) end
  return num_seen
end

-- Returns how many jobs were looked at, and whether more are left.
function reclaim(me, number, now, may_declare)
  local num_seen, budget = 0, LIMITS.SLICE_JOBS
  local dead, has_more = dead_workers(me, number, now, may_declare)
  for _, incarnation in ipairs(dead) do
    if num_seen >= budget or slice.is_spent() then return num_seen, true end
    num_seen = num_seen + reclaim_from(incarnation, budget - num_seen)
  end
  return num_seen, has_more or num_seen >= budget or slice.is_spent()
end

end
