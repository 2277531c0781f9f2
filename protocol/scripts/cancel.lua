-- Cancel jobs: a waiting job and one whose owner is dead end at once, another running one is flagged for its owner. The
-- first terminal script wins.
--
-- KEYS: config.
-- ARGV: reason or '', packed array of job ids.
-- Reply: for each the state reached, 'asked', 'unknown', or 'again': not looked at, since the jobs before it have many
--   choices.
-- Reads: alive, batch, buckets, clock, depth, held, job, lane, leased, limits, outbox, parked, ready, served, tenants,
--   weights, worker.
-- Writes: batch, bell, buckets, callbacks, channel, counters, delayed, depth, garbage, heads, held, idem, job, lane,
--   leased, members, outbox, parked, payload, ready, result, served, suspects, tenants, timers, worker.
-- Bound: LIMITS.SLICE_JOBS jobs, until LIMITS.SLICE_CHANNELS channels are closed.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

if not ARGV[2] then return wrong_arguments() end
local reason = ARGV[1] ~= '' and ARGV[1] or END_REASONS.cancelled.error

local how = { error = reason, error_code = END_REASONS.cancelled.error_code }

local function ask(job, lease)
  if stop(job, lease, 'cancelled', how) then return job.state end
  job.asked = reason
  save(job)
  return 'asked'
end

local function cancel(id)
  if slice.is_spent() then return 'again' end
  local job = load_job(id)
  if not job then return 'unknown' end
  if job.state ~= 'queued' and job.state ~= 'running' then return job.state end
  local lease = leases.of(job)
  if job.state == 'running' and lease then return ask(job, lease) end
  end_without_worker(job, lease, 'cancelled', how)
  return 'cancelled'
end

local answers = {}
for i, id in ipairs(rows_of(ARGV[2], LIMITS.SLICE_JOBS, 'string')) do answers[i] = cancel(id) end
finish()
return answers
