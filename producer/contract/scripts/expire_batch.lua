-- Set the deadline of a batch. When it passes, the batch is closed and its unfinished jobs expire, in slices.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: batch, time in milliseconds.
-- Reply: its totals as a flat map.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local is_sound = is_text(ARGV[1], LIMITS.MAX_BATCH_CHARS) and whole(ARGV[2], LIMITS.MAX_NUMBER)
if not is_sound then return wrong_arguments() end
local key = batch_key(ARGV[1])
if not call('HGET', key, 'completed') then
  call('HSET', key, 'deadline', ARGV[2])
  call('ZADD', TIMERS, ARGV[2], 'batch|' .. ARGV[1])
  call('PERSIST', key)
end
finish()
return call('HGETALL', key)
