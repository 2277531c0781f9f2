-- include: lib_settings lib_format_1
-- Begin a migration: take over settings and weights of format 1 that the queue does not have, and close its keys to
-- submits.
--
-- KEYS: config.
-- ARGV[1]: the sentence that clients of format 1 show.
-- Reply: 1 if this call closed them, else 0.
-- Reads: depth, heads, job, lane, parked, 1:config, 1:server, 1:weights.
-- Writes: bell, config, depth, heads, lane, ready, server, weights, 1:config.
-- Bound: all settings and weights; all lanes if the mode changes.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

-- Facts about workers and the server, and clocks of tests.
local IS_LEFT = { features = true, max_job_tokens = true, test_clock_ms = true, test_clock_offset_ms = true }

local from = earlier.key('config')
local found = try('HGETALL', from)
local known = failed(found) and {} or as_map(found)
if failed(found) or known.durability == ARGV[1] then return 0 end

local taken = {}
for name, value in pairs(known) do
  local is_setting = not IS_LEFT[name] and not SETTINGS[name] and value ~= '' and not refusal_of(name, value)
  if is_setting then taken[#taken + 1], taken[#taken + 2] = name, value end
end
write_settings(taken)
for _, name in ipairs({ 'weights', 'server' }) do try('COPY', earlier.key(name), PREFIX .. name) end
-- Clients of format 1 show a durability that they do not know. A bound of 0 refuses submits of those that name one.
call('HSET', from, 'durability', ARGV[1], 'max_waiting_jobs', 0)
finish()
return 1
