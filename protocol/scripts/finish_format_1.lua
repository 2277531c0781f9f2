-- include: lib_format_1
-- Say what is left of format 1. If nothing is and the caller asks for it, end the format: totals are added to those of
-- the queue, and scripts of format 1 refuse every call.
--
-- KEYS: config.
-- ARGV: the sentence that a person finds in place of the keys, 1 to end the format if nothing is left.
-- Reply: 1 if the format has ended, waiting jobs, running jobs, unread events and callbacks, living workers.
-- Reads: 1:alive, 1:callbacks, 1:counters, 1:delayed, 1:heads, 1:outbox, 1:suspects, 1:worker.
-- Writes: counters, 1:alive, 1:bell, 1:callbacks, 1:clock, 1:config, 1:counters, 1:dead, 1:delayed, 1:depth, 1:garbage,
--   1:isolator, 1:leases, 1:models, 1:offers, 1:outbox, 1:parents, 1:served, 1:server, 1:storages, 1:suspects,
--   1:tenants, 1:timers, 1:weights.
-- Bound: all workers of format 1.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end
if call('TYPE', earlier.key('leases')).ok == 'string' then return { 1, 0, 0, 0, 0 } end

local function size(command, name)
  local found = try(command, earlier.key(name))
  return failed(found) and 0 or found
end

local function counted_in(name)
  local found = try('HGET', earlier.key('counters'), name)
  return type(found) == 'string' and whole(found, LIMITS.MAX_NUMBER) or 0
end

-- By the keys that pulls read: a counter may be wrong.
local function has_waiting_jobs()
  local total = size('ZCARD', 'delayed') + size('ZCARD', 'suspects')
  for _, class in ipairs({ RETURNED, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 }) do
    total = total + size('ZCARD', 'heads:' .. class)
  end
  return total > 0
end

local function num_living()
  local total, found = 0, try('ZRANGE', earlier.key('alive'), 0, -1)
  for _, incarnation in ipairs(failed(found) and {} or found) do
    if not earlier.is_gone(incarnation) then total = total + 1 end
  end
  return total
end

local living, unread = num_living(), size('XLEN', 'outbox') + size('XLEN', 'callbacks')
if ARGV[2] ~= '1' or has_waiting_jobs() or living + unread > 0 then
  return { 0, counted_in('waiting_jobs'), counted_in('running_jobs'), unread, living }
end

-- Of jobs whose rows have expired.
local function add_totals()
  local found = try('HGETALL', earlier.key('counters'))
  local totals, ended = failed(found) and {} or as_map(found), 0
  local function total(name) return whole(totals[name], LIMITS.MAX_NUMBER) or 0 end
  for _, state in ipairs({ 'done', 'failed', 'cancelled', 'expired' }) do
    count(state, total(state))
    ended = ended + total(state)
  end
  count('submitted', ended)
  for _, name in ipairs({ 'requeued', 'worker_deaths', 'results_missed' }) do count(name, total(name)) end
end

add_totals()
for name in string.gmatch([[
  counters depth timers delayed outbox callbacks bell dead suspects isolator alive served garbage clock weights tenants
  offers parents models server storages
]], '%S+') do call('UNLINK', earlier.key(name)) end
call('SET', earlier.key('leases'), ARGV[1])
call('DEL', earlier.key('config'))
call('HSET', earlier.key('config'), 'durability', ARGV[1], 'max_waiting_jobs', 0)
finish()
return { 1, 0, 0, 0, 0 }
