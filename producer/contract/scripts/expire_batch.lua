-- Set the deadline of a batch. When it passes, the batch is closed and its unfinished jobs expire, in slices.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: batch, time in milliseconds.
-- Reply: its totals as a flat map.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

if not whole(ARGV[2], LIMITS.MAX_NUMBER) then return redis.error_reply('ERR wrong arguments') end
local key = batch_key(ARGV[1])
if not call('HGET', key, 'completed') then
  call('HSET', key, 'deadline', ARGV[2])
  call('ZADD', TIMERS, ARGV[2], 'batch|' .. ARGV[1])
  call('PERSIST', key)
end
finish()
return call('HGETALL', key)
