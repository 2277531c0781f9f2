-- include: lib_timers lib_deaths lib_settling lib_reclaim
-- Fire due timers, return jobs of workers whose heartbeat has expired, and forget what is old: a slice of each. A queue
-- without workers needs it too. Before that, end those of some jobs whose own time has passed.
--
-- KEYS: config.
-- ARGV: incarnation of the caller or '', number of its call, packed array of the ids of jobs to look at first, 1 if it
--   may return jobs of workers whose death was not reported, until when or ''.
-- Reply: {timers fired, jobs returned, 1 if more is due, now, when the next call is due or false}.
-- Reads: alive, batch, buckets, clock, dead, depth, heads, held, job, lane, leased, limits, members, outbox, parked,
--   ready, served, tenants, timers, weights, worker.
-- Writes: alive, batch, bell, buckets, callbacks, channel, counters, dead, delayed, depth, garbage, heads, held, idem,
--   job, lane, leased, members, outbox, parked, payload, ready, result, served, suspects, tenants, timers, worker.
-- Bound: LIMITS.SLICE_JOBS overdue jobs, LIMITS.SLICE_JOBS due timers (LIMITS.SORTED_TIMERS are sorted),
--   LIMITS.SLICE_JOBS jobs of expired batches, LIMITS.SLICE_JOBS jobs of LIMITS.MAX_DEAD_PER_CALL dead workers (whose
--   leases are all read) and LIMITS.SLICE_JOBS parked tenants, until LIMITS.SLICE_CHANNELS channels are closed.

write_even_when_full()
local me, number, until_ms = ARGV[1], whole(ARGV[2], LIMITS.MAX_NUMBER), ARGV[5]
local is_right = type(me) == 'string' and #me <= LIMITS.MAX_INCARNATION_BYTES and number and ARGV[3] and ARGV[4]
  and until_ms and (until_ms == '' or whole(until_ms, LIMITS.MAX_NUMBER))
if not is_right then return wrong_arguments() end
local overdue = rows_of(ARGV[3], LIMITS.SLICE_JOBS, 'string')
local wrong = wrong_key(me ~= '' and me or nil)
if wrong then return wrong end

local now = beat_time()
local num_fired, has_more_timers = fire_timers(overdue)
local may_declare = ARGV[4] == '1' and NOW <= (tonumber(until_ms) or NOW)
local num_returned, has_more_dead = reclaim(me, number, now, may_declare)
local has_more_parked = limits and limits.look_at_due()
finish()
return {
  num_fired, num_returned, (has_more_timers or has_more_dead or has_more_parked) and 1 or 0, NOW,
  earlier(next_timer(), next_expiry(me, now)) or false,
}
