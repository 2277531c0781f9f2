-- include: lib_deaths lib_recount lib_models
-- Renew the heartbeat of an incarnation, report lost and flagged jobs, and return jobs that it never received.
--
-- KEYS: config. ARGV: incarnation, number of the last pull processed, expiry of
--   the heartbeat in ms, packed array of the job ids held, then name and value of each field about the worker.
-- Reply: {now, 1 if the last heartbeat had expired, {job, requested state, …}, {lost job …}, stamp of the settings,
--   number of jobs that wait for room in a worker}.
-- Reads: alive, batch, buckets, clock, counters, delayed, depth, heads, held, job, lane, leased, limits, offers,
--   outbox, parked, ready, served, suspects, tenants, timers, weights, worker.
-- Writes: alive, batch, bell, buckets, callbacks, channel, clock, config, counters, delayed, depth, garbage, heads,
--   held, idem, job, lane, leased, members, models, offers, outbox, parents, parked, payload, ready, result, served,
--   serving, suspects, tenants, timers, worker.
-- Bound: the named jobs and all leases of the worker, of which LIMITS.SLICE_JOBS return, until LIMITS.SLICE_CHANNELS
--   channels are closed; LIMITS.MAX_ADAPTERS adapters; LIMITS.SLICE_JOBS parked tenants and LIMITS.SLICE_JOBS limits,
--   with LIMITS.SLICE_JOBS jobs of each; once a second the first LIMITS.SLICE_JOBS waiting jobs and LIMITS.SLICE_JOBS
--   tenants, and after a step back of the clock LIMITS.SORTED_TIMERS delayed jobs and LIMITS.SORTED_TIMERS timers.

write_even_when_full()
if not is_text(ARGV[1], LIMITS.MAX_INCARNATION_BYTES) then return wrong_arguments() end
local wrong = wrong_key(ARGV[1])
if wrong then return wrong end

local me, processed, expires_in = ARGV[1], tonumber(ARGV[2]), whole(ARGV[3], LIMITS.MAX_NUMBER)
local listed = rows_of(ARGV[4], math.huge, 'string')
if not processed or not expires_in or #ARGV % 2 ~= 0 then return wrong_arguments() end
local stops, lost, is_listed = {}, {}, {}

local function renew()
  local key = worker_key(me)
  local expiry = call('ZSCORE', ALIVE, me)
  local was_known = call('EXISTS', key) == 1
  local most = math.floor(expires_in / LIMITS.BEATS_PER_LIFE)
  local now = beat_time(most)
  call('HSET', CLOCK, 'at', now, 'read', NOW, 'most', most)
  call('ZADD', ALIVE, now + expires_in, me)
  local about = { 'beaten', NOW, 'life', expires_in }
  for i = 5, #ARGV do about[#about + 1] = ARGV[i] end
  local said = as_map({ unpack(ARGV, 5) })
  if said.model then note_model(me, said.model, now, now + expires_in) end
  if said.model and said.adapters then note_adapters(me, said.adapters, said.model, now, now + expires_in) end
  if said.model and said.offer then note_offer(said.model, said.offer, now, now + expires_in) end
  call('HSET', key, unpack(about))
  -- It is alive: if it dies again, that is a new death with its own count of mates.
  call('HDEL', key, 'mates', 'death', 'stopped')
  call('PEXPIRE', key, LIMITS.WORKER_KEPT_S * 1000)
  if expiry then return tonumber(expiry) <= now end
  return was_known and call('HEXISTS', key, 'pull') == 1
end

-- It was only slow: remove the death that was recorded. A job that was a suspect only because of it returns to its
-- lane.
local function take_back(id)
  local job = load_job(id)
  if not job or not job.deaths then return end
  local before, kept = #deaths_of(job), take_back_death(job, me)
  if #kept == before or #kept >= LIMITS.SUSPECT_DEATHS or job.state ~= 'queued' then return end
  if call('ZREM', SUSPECTS, id) == 0 then return end
  enqueue_again(job, leases.of_row(job))
end

-- The reply to this worker's own end may be in flight: only an end by another worker means that the job is lost.
local function was_ended_by_me(id)
  local job = load_job(id)
  return job and job.ended_by and string.sub(job.ended_by, 1, #me + 1) == me .. ':'
end

local function look_at(id, packed)
  local lease = packed and unpack_lease(me, packed)
  if lease then
    if lease.flag ~= '' then stops[#stops + 1], stops[#stops + 2] = id, lease.flag end
  elseif not was_ended_by_me(id) then
    lost[#lost + 1] = id
    take_back(id)
  end
end

local function look_at_all()
  for from = 1, #listed, 1000 do
    local to = math.min(from + 999, #listed)
    local packed = call('HMGET', held_key(me), unpack(listed, from, to))
    for i = from, to do
      is_listed[listed[i]] = true
      look_at(listed[i], packed[i - from + 1])
    end
  end
end

-- A lease from a pull before the list was made, and missing in the list: the worker never received it.
local function is_orphan(id, lease) return not is_listed[id] and lease.number <= processed end

local function give_back_orphan(id, lease)
  local job, why = load_running(id)
  if not job then
    forget_lease_of_nothing(me, id, why)
  elseif job.owner ~= me then
    call('HDEL', held_key(me), id)
  elseif lease.flag ~= '' then
    end_without_worker(job, lease, lease.flag, END_REASONS[lease.flag])
  else
    return_job(job, lease, 'lost_reply')
  end
end

local function give_back_orphans()
  local num_given = 0
  local flat = call('HGETALL', held_key(me))
  for i = 1, #flat, 2 do
    local lease = unpack_lease(me, flat[i + 1])
    if not lease then
      call('HDEL', held_key(me), flat[i])
    elseif num_given < LIMITS.SLICE_JOBS and not slice.is_spent() and is_orphan(flat[i], lease) then
      num_given = num_given + 1
      give_back_orphan(flat[i], lease)
    end
  end
end

-- A deregistered incarnation stays deregistered, and one whose process has ended stays dead: a beat that was in flight
-- does not bring it back.
local function has_left()
  return call('HGET', worker_key(me), 'farewell') == '1' or call('HGET', worker_key(me), 'reported') == '1'
end

local function num_ready()
  if SETTINGS.paused == '1' then return 0 end
  local waiting = tonumber(call('HGET', COUNTERS, 'waiting_jobs') or '') or 0
  return math.max(0, waiting - call('ZCARD', DELAYED) - call('ZCARD', SUSPECTS))
end

local stamp = SETTINGS.stamp or ''
if has_left() then return { NOW, 1, {}, listed, stamp, 0 } end
local was_dead = renew()
look_at_all()
give_back_orphans()
check_limits(me)
finish()
recount()
return { NOW, was_dead and 1 or 0, stops, lost, stamp, num_ready() }
