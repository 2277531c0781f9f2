-- include: lib_format_1 lib_migration
-- Move batches of format 1 that are named.
--
-- KEYS: config.
-- ARGV[1]: packed array of names.
-- Reply: how many were moved.
-- Reads: batch, 1:batch.
-- Writes: batch, callbacks, garbage, timers, 1:batch, 1:timers.
-- Bound: LIMITS.SLICE_JOBS batches.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local num_moved = 0
for _, batch in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do
  if is_text(batch, LIMITS.MAX_BATCH_CHARS) and move_batch(batch) then num_moved = num_moved + 1 end
end
finish()
return num_moved
