-- include: lib_counts lib_totals
-- Compare counters with counts for the audit, at one instant.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV[1]: packed array of lanes (`<class>:<tenant>`) whose keys were seen.
-- Reply: {stamp, counters, waiting jobs, running jobs, {{lane, depth, entries} …} that differ, outbox entries, first
--   of them or false, {lane that no pull finds …}}; counters are flat.
-- Reads: alive, counters, delayed, depth, heads, held, lane, outbox, parked, ready, suspects.
-- Writes: nothing.
-- Bound: all lanes and workers, a few commands for each.

local waiting, running, wrong_lanes, unlisted = count_up(rows_of(ARGV[1], math.huge, 'string'))
local first = call('XRANGE', OUTBOX, '-', '+', 'COUNT', 1)[1]
return {
  stamp(), read_counters(), waiting, running, wrong_lanes, call('XLEN', OUTBOX), first and first[1] or false,
  unlisted,
}
