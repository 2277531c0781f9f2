-- include: lib_counts lib_totals
-- Compare counters with counts for the audit: of all lanes at one instant, or of a slice of many.
--
-- KEYS: config.
-- ARGV[1]: packed array of lanes (`<class>:<tenant>`). ARGV[2]: 1 if they are a slice of all. If they are not, they are
--   those whose keys were seen, and the script finds the others, unless there are too many.
-- Reply: {stamp, counters, entries of lanes, 1 if of all lanes, waiting jobs elsewhere, running jobs,
--   {{lane, depth, entries} …} that differ, {lane that no pull finds …}, entries of the outbox, its first or false, its
--   last}; counters are flat.
-- Reads: alive, bell, counters, delayed, depth, heads, held, lane, outbox, parked, ready, suspects.
-- Writes: nothing.
-- Bound: LIMITS.LANES_PER_COUNT lanes that are named, or as many as there are in all; all workers.

local num_entries, is_all, wrong_lanes, unlisted =
  count_lanes(rows_of(ARGV[1], LIMITS.LANES_PER_COUNT, 'string'), ARGV[2])
local first = call('XRANGE', OUTBOX, '-', '+', 'COUNT', 1)[1]
return {
  stamp(), read_counters(), num_entries, is_all and 1 or 0, num_off_lanes(), held_jobs(), wrong_lanes, unlisted,
  call('XLEN', OUTBOX), first and first[1] or false, last_id(OUTBOX),
}
