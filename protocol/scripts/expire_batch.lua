-- include: lib_batches
-- Set the deadline of a batch. When it passes, the batch is closed and its unfinished jobs expire, in slices.
--
-- KEYS: config.
-- ARGV: batch, time in milliseconds, 1 if it is from now.
-- Reply: its totals as a flat map.
-- Reads: batch.
-- Writes: batch, timers.
-- Bound: one batch.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local is_sound = is_text(ARGV[1], LIMITS.MAX_BATCH_CHARS) and whole(ARGV[2], LIMITS.MAX_NUMBER)
if not is_sound then return wrong_arguments() end
local key = batch_key(ARGV[1])
local deadline = ARGV[3] == '1' and from_now(tonumber(ARGV[2])) or ARGV[2]
if not call('HGET', key, 'completed') then
  call('HSET', key, 'deadline', deadline)
  call('HDEL', key, 'expiring')
  call('ZADD', TIMERS, deadline, 'batch|' .. ARGV[1])
  call('PERSIST', key)
end
finish()
return read_batch(ARGV[1])
