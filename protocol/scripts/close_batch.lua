-- include: lib_batches
-- Close a batch: it accepts no more jobs, and writes one callback when all of them have ended. If they already have, a
-- new URL gets its callback at once.
--
-- KEYS: config.
-- ARGV: batch, callback URL or ''.
-- Reply: its totals as a flat map.
-- Reads: batch.
-- Writes: batch, callbacks, timers.
-- Bound: one batch.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local is_sound = is_text(ARGV[1], LIMITS.MAX_BATCH_CHARS) and is_optional(ARGV[2], LIMITS.MAX_URL_CHARS)
if not is_sound then return wrong_arguments() end
local key = batch_key(ARGV[1])
local has_new_url = ARGV[2] ~= '' and ARGV[2] ~= call('HGET', key, 'url')
call('HSET', key, 'closed', 1)
if has_new_url then call('HSET', key, 'url', ARGV[2]) end
complete_batch(ARGV[1], as_map(read_batch(ARGV[1])), has_new_url)
finish()
return read_batch(ARGV[1])
