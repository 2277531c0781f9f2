-- List living workers, a page at a time. A worker that lives meanwhile is on a page, perhaps on two.
--
-- KEYS: config.
-- ARGV: cursor, 0 to begin; then the fields of their heartbeats that are wanted: none means all. `held` is counted
--   here.
-- Reply: {cursor of the next page or 0, {incarnation, {field, value …} …}}.
-- Reads: alive, clock, held, worker.
-- Writes: nothing.
-- Bound: a page of about LIMITS.WORKERS_PER_PAGE workers; of more if LIMITS.FIELDS_PER_PAGE fields suffice for them.

INCLUDE lib_time lib

local cursor, wanted = ARGV[1] or '', {}
if not string.find(cursor, '^%d+$') or #cursor > 20 or #ARGV > 100 then return wrong_arguments() end
for i = 2, #ARGV do wanted[#wanted + 1] = ARGV[i] end

local function all_of(incarnation)
  local about = call('HGETALL', worker_key(incarnation))
  about[#about + 1], about[#about + 2] = 'held', tostring(call('HLEN', held_key(incarnation)))
  return about
end

local function some_of(incarnation)
  local about, values = {}, call('HMGET', worker_key(incarnation), unpack(wanted))
  for i, name in ipairs(wanted) do
    local value = name == 'held' and tostring(call('HLEN', held_key(incarnation))) or values[i]
    if value then about[#about + 1], about[#about + 2] = name, value end
  end
  return about
end

local size = LIMITS.WORKERS_PER_PAGE
if #wanted > 0 then size = math.max(size, math.floor(LIMITS.FIELDS_PER_PAGE / #wanted)) end
local page, now, workers = call('ZSCAN', ALIVE, cursor, 'COUNT', size), beat_time(), {}
local listed = page[2]
for i = 1, #listed, 2 do
  if tonumber(listed[i + 1]) > now then
    workers[#workers + 1] = listed[i]
    workers[#workers + 1] = #wanted > 0 and some_of(listed[i]) or all_of(listed[i])
  end
end
return { page[1], workers }
