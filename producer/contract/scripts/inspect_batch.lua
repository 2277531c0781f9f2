-- Read the totals of a batch. Never writes.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV[1]: batch.
-- Reply: its totals as a flat map.

return call('HGETALL', batch_key(ARGV[1]))
