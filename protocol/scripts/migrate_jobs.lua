-- include: lib_format_1 lib_migration
-- Move jobs of format 1 that are named, in any state; of running ones those whose owner has ended.
--
-- KEYS: config.
-- ARGV[1]: packed array of job ids.
-- Reply: for each what `move_job` returns, or 'again': not looked at, since the jobs before it have many choices.
-- Reads: batch, buckets, depth, heads, job, lane, leased, limits, outbox, parked, ready, served, tenants, weights,
--   1:batch, 1:dead, 1:depth, 1:idem, 1:job, 1:lane, 1:leases, 1:suspects, 1:tenants, 1:worker.
-- Writes: batch, bell, buckets, callbacks, channel, counters, dead, delayed, depth, garbage, heads, idem, job, lane,
--   members, outbox, parked, payload, readers, ready, result, served, suspects, tenants, timers, 1:batch, 1:channel,
--   1:counters, 1:dead, 1:delayed, 1:depth, 1:heads, 1:held, 1:idem, 1:job, 1:lane, 1:leases, 1:members, 1:payload,
--   1:readers, 1:ready, 1:result, 1:suspects, 1:tenants, 1:timers.
-- Bound: LIMITS.SLICE_JOBS jobs, until LIMITS.SLICE_CHANNELS channels are moved.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local answers = {}
for i, id in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do
  answers[i] = slice.is_spent() and 'again' or move_job(id)
end
finish()
earlier.finish()
return answers
