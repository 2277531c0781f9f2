-- Read the state of a partition. Never writes.
--
-- KEYS: config, then the fixed keys of the queue.
-- Reply: {now, counters, settings, oldest head or false, dead, suspects, outbox entries, {incarnation, about …},
--   {class, tenant, jobs, tokens …}, callbacks entries}; maps are flat.

local function living()
  local workers = {}
  for _, incarnation in ipairs(call('ZRANGEBYSCORE', ALIVE, '(' .. beat_time(), '+inf', 'LIMIT', 0, LIMITS.MAX_LISTED)) do
    local about = call('HGETALL', worker_key(incarnation))
    about[#about + 1] = 'held'
    about[#about + 1] = tostring(call('HLEN', held_key(incarnation)))
    workers[#workers + 1] = incarnation
    workers[#workers + 1] = about
  end
  return workers
end

local listed, oldest = {}, nil

local function list_class(class)
  local heads = call('ZRANGE', PREFIX .. 'heads:' .. class, 0, LIMITS.MAX_LISTED - 1, 'WITHSCORES')
  if heads[2] then oldest = math.min(oldest or math.huge, tonumber(heads[2])) end
  for i = 1, #heads, 2 do
    if #listed >= LIMITS.MAX_LISTED then return end
    local lane = open_lane(class, heads[i])
    listed[#listed + 1] = { tostring(class), heads[i], lane.jobs, lane.tokens }
  end
end

list_class(RETURNED)
for class = LIMITS.MAX_PRIORITY, 0, -1 do list_class(class) end
return {
  NOW, call('HGETALL', COUNTERS), call('HGETALL', KEYS[1]), oldest or false, call('ZCARD', DEAD),
  call('ZCARD', SUSPECTS), call('XLEN', OUTBOX), living(), listed,
  call('XLEN', CALLBACKS),
}
