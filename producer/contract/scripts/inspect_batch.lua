-- Look at a batch. Writes nothing.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV[1]: batch.
-- Reply: its numbers as a flat map.

return call('HGETALL', batch_key(ARGV[1]))
