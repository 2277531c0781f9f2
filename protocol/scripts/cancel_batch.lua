-- Close a batch and cancel one slice of its jobs, each as `cancel` does.
--
-- KEYS: config.
-- ARGV: batch, reason or ''.
-- Reply: {how many ended, how many were asked, 1 if more may be left}.
-- Reads: alive, batch, buckets, clock, depth, held, job, lane, leased, limits, members, outbox, parked, ready, served,
--   tenants, weights, worker.
-- Writes: batch, bell, buckets, callbacks, channel, counters, delayed, depth, garbage, heads, held, idem, job, lane,
--   leased, members, outbox, parked, payload, ready, result, served, suspects, tenants, timers, worker.
-- Bound: LIMITS.SLICE_JOBS jobs, until LIMITS.SLICE_CHANNELS channels are closed.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

if not is_text(ARGV[1], LIMITS.MAX_BATCH_CHARS) or not ARGV[2] then return wrong_arguments() end
local cancelled = END_REASONS.cancelled
local reason = { error = ARGV[2] ~= '' and ARGV[2] or cancelled.error, error_code = cancelled.error_code }
local num_ended, num_asked, has_more = end_batch(ARGV[1], 'cancelled', reason, LIMITS.SLICE_JOBS)
finish()
return { num_ended, num_asked, has_more and 1 or 0 }
