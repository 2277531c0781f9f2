-- include: lib_batches
-- Read the totals of a batch.
--
-- KEYS: config.
-- ARGV[1]: batch.
-- Reply: its totals as a flat map.
-- Reads: batch.
-- Writes: nothing.
-- Bound: one batch.

if not is_text(ARGV[1], LIMITS.MAX_BATCH_CHARS) then return wrong_arguments() end
return read_batch(ARGV[1])
