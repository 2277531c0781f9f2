-- include: lib_settings
-- Write settings of a queue; an empty value removes one.
--
-- KEYS: config.
-- ARGV: name, value, name, value …
-- Reply: 'ok'.
-- Reads: alive, buckets, depth, heads, held, job, lane, leased, limits, parked, ready, served.
-- Writes: bell, buckets, config, depth, heads, lane, leased, limits, parked, ready, served, weights.
-- Bound: the named settings; all lanes if the mode changes; all leases for each tenant whose limit changes.

write_even_when_full()
local wrong = wrong_key(nil, WEIGHTS, TENANT_LIMITS)
if wrong then return wrong end

-- All are checked before one is written.
for i = 1, #ARGV, 2 do
  local wanted = not ARGV[i + 1] and 'followed by its value' or refusal_of(ARGV[i], ARGV[i + 1])
  if wanted then return redis.error_reply('ERR ' .. ARGV[i] .. ' must be ' .. wanted) end
end

write_settings(ARGV)
finish()
return 'ok'
