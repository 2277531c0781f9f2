-- Read the state of a partition. Never writes.
--
-- KEYS: config, then the fixed keys of the queue.
-- Reply: {now, counters, settings, oldest head or false, dead, suspects, outbox entries, {incarnation, about …},
--   {class, tenant, jobs, tokens …}, callbacks entries, delayed jobs, those of them that are due, next deadline or
--   false}; maps are flat.

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

-- Of the nearest timers: the delayed jobs that are due, which wait until a worker fires their timers, and the time of
-- the first that ends jobs. The score of an overdue timer may be below 0.
local function read_timers()
  local due, deadline = 0, false
  local nearest = call('ZRANGE', TIMERS, 0, LIMITS.MAX_LISTED - 1, 'WITHSCORES')
  for i = 1, #nearest, 2 do
    local kind, at = string.match(nearest[i], '^[^|]*'), tonumber(nearest[i + 1])
    local is_start = kind == 'not_before' or kind == 'retry'
    if is_start and at <= NOW then due = due + 1 end
    if not is_start and kind ~= 'stop' and not deadline then deadline = at < 0 and NOW or at end
  end
  return due, deadline
end

-- Settings, with the weights of listed tenants and of about as many others.
local function settings_and_weights()
  local all = call('HGETALL', KEYS[1])
  local scanned = try('HSCAN', WEIGHTS, 0, 'COUNT', LIMITS.MAX_LISTED)
  if failed(scanned) then return all end
  local found = as_map(scanned[2])
  for _, lane in ipairs(listed) do found[lane[2]] = found[lane[2]] or call('HGET', WEIGHTS, lane[2]) or nil end
  for tenant, weight in pairs(found) do all[#all + 1], all[#all + 2] = 'weight:' .. tenant, weight end
  return all
end

local due, deadline = read_timers()
list_class(RETURNED)
for class = LIMITS.MAX_PRIORITY, 0, -1 do list_class(class) end
return {
  NOW, call('HGETALL', COUNTERS), settings_and_weights(), oldest or false, call('ZCARD', DEAD),
  call('ZCARD', SUSPECTS), call('XLEN', OUTBOX), living(), listed,
  call('XLEN', CALLBACKS), call('ZCARD', DELAYED), due, deadline,
}
