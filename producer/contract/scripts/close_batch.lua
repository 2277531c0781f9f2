-- Close a batch: it takes no more jobs, and says once when all of it has ended.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: batch, callback URL or ''.
-- Reply: its numbers as a flat map.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local key = batch_key(ARGV[1])
call('HSET', key, 'closed', 1)
if ARGV[2] ~= '' then call('HSET', key, 'url', ARGV[2]) end
complete_batch(ARGV[1], as_map(call('HGETALL', key)))
finish()
return call('HGETALL', key)
