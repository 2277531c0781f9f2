-- include: lib_deaths lib_settling lib_models lib_offers
-- Return jobs to the queue, where they resume at their next token, and deregister the incarnation if requested. Jobs
-- returned by a broken worker count as held at its death, so that a job that breaks workers is found.
--
-- KEYS: config.
-- ARGV: incarnation, 1 to deregister, packed array of {job, epoch}, 1 if it broke, 1 if its engine declines the jobs.
-- Reply: for each 1 (returned, or ended as requested), 0 (no longer owned by this incarnation), or, of a declined one,
--   2: each living engine of its model has declined it, and it stays with this worker, which ends it.
-- Reads: batch, buckets, clock, dead, depth, heads, held, job, lane, leased, limits, offers, outbox, parents, parked,
--   ready, served, tenants, weights, worker.
-- Writes: alive, batch, bell, buckets, callbacks, channel, counters, dead, delayed, depth, garbage, heads, held, idem,
--   job, lane, leased, members, outbox, parked, payload, ready, result, served, serving, suspects, tenants, timers,
--   worker.
-- Bound: LIMITS.MAX_JOBS_PER_CALL jobs; flagged ones end until LIMITS.SLICE_CHANNELS channels are closed.

write_even_when_full()
if not is_text(ARGV[1], LIMITS.MAX_INCARNATION_BYTES) then return wrong_arguments() end
local wrong = wrong_key(ARGV[1])
if wrong then return wrong end

local me, is_deregistered, has_broken, is_declined = ARGV[1], ARGV[2] == '1', ARGV[4] == '1', ARGV[5] == '1'
local death = has_broken and about_death(me)

local asked = rows_of(ARGV[3], LIMITS.MAX_JOBS_PER_CALL, 'string', 'number')

-- Leave a job to a living worker whose engine has not declined it, if there is one.
local function decline(job, lease)
  offers.decline(job, me)
  if not offers.has_other(job) then return 2 end
  return_job(job, lease, 'declined')
  return 1
end

local function give_back(id, epoch)
  local job = load_running(id)
  local lease = job and job.owner == me and leases.held(job)
  if not lease or lease.epoch ~= epoch then return 0 end
  if lease.flag ~= '' then
    -- Too many ends for one call: the job stays leased, and a pull or beat ends it.
    if slice.is_spent() then return 0 end
    end_without_worker(job, lease, lease.flag, END_REASONS[lease.flag])
  elseif is_declined then
    return decline(job, lease)
  elseif not (death and is_settled_by_death(job, lease, death)) then
    return_job(job, lease, death and 'death' or 'given_back')
  end
  return 1
end

-- Jobs it still holds can be reclaimed at once, and no further death is recorded. The deregistration is kept: a pull or
-- beat may still be in flight, and must not bring the incarnation back.
local function deregister()
  leave_model(me)
  if call('EXISTS', held_key(me)) == 0 then
    call('ZREM', ALIVE, me)
    call('DEL', worker_key(me))
  else
    call('ZADD', ALIVE, beat_time() - 1, me)
    notify()
  end
  call('HSET', worker_key(me), 'farewell', 1)
  call('PEXPIRE', worker_key(me), LIMITS.WORKER_KEPT_S * 1000)
end

local answers = {}
for i, row in ipairs(asked) do answers[i] = give_back(row[1], row[2]) end
if is_deregistered then deregister() end
finish()
return answers
