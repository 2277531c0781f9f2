-- include: lib_totals
-- Read the state of a partition, without its lanes and weights (HSCAN of `depth` and `weights`) and workers
-- (`list_workers`).
--
-- KEYS: config.
-- Reply: {now, counters, settings, oldest head or false, dead, suspects, outbox entries, living workers, {model that
--   one of them serves …}, callbacks entries, delayed jobs, those of them that are due, next deadline or false,
--   {`<offer>\n<model>` of living workers …}, {`<adapter>\n<model>` of living workers …}}; maps are flat.
-- Reads: alive, callbacks, clock, counters, dead, delayed, heads, models, offers, outbox, parents, serving, suspects,
--   timers.
-- Writes: nothing.
-- Bound: LIMITS.MOST_NEAREST_TIMERS timers, LIMITS.MAX_OFFERS offers, LIMITS.MAX_PARENTS adapters, all models of living
--   workers.

local function oldest_head()
  local oldest
  for _, class in ipairs({ RETURNED, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 }) do
    local at = tonumber(call('ZRANGE', heads_key(class), 0, 0, 'WITHSCORES')[2] or '')
    if at then oldest = math.min(oldest or at, at) end
  end
  return oldest
end

-- Of the nearest timers: the delayed jobs that are due, which wait until a worker fires their timers, and the time of
-- the first that ends jobs. Reads on until it has seen both, within a limit; if more timers are due, the rest counts as
-- those that were read. The score of an overdue timer may be below 0.
local function read_timers()
  local due, num_read, deadline, is_over = 0, 0, false, false
  while not is_over and num_read < LIMITS.MOST_NEAREST_TIMERS do
    local nearest = call('ZRANGE', TIMERS, num_read, num_read + LIMITS.NEAREST_TIMERS - 1, 'WITHSCORES')
    for i = 1, #nearest, 2 do
      local kind, at = string.match(nearest[i], '^[^|]*'), tonumber(nearest[i + 1])
      local is_start = kind == 'not_before' or kind == 'retry'
      if is_start and at <= NOW then due = due + 1 end
      if not is_start and kind ~= 'stop' and not deadline then deadline = at < 0 and NOW or at end
      is_over = deadline and at > NOW
      num_read = num_read + 1
    end
    is_over = is_over or #nearest < 2 * LIMITS.NEAREST_TIMERS
  end
  if is_over then return due, deadline end
  local num_due = call('ZCOUNT', TIMERS, '-inf', NOW)
  return num_due > num_read and math.floor(due * num_due / num_read) or due, deadline
end

local now = '(' .. beat_time()
local function served_models()
  local listed, served = try('ZRANGEBYSCORE', PREFIX .. 'models', now, '+inf'), {}
  for _, model in ipairs(failed(listed) and {} or listed) do
    local num_workers = try('ZCOUNT', SERVING .. model, now, '+inf')
    if failed(num_workers) or num_workers > 0 then served[#served + 1] = model end
  end
  return served
end

local function living_offers()
  local listed = try('ZRANGEBYSCORE', OFFERS, now, '+inf', 'LIMIT', 0, LIMITS.MAX_OFFERS)
  return failed(listed) and {} or listed
end

local function living_parents()
  local listed = try('ZRANGEBYSCORE', PARENTS, now, '+inf', 'LIMIT', 0, LIMITS.MAX_PARENTS)
  return failed(listed) and {} or listed
end

local due, deadline = read_timers()
return {
  NOW, read_counters(), call('HGETALL', KEYS[1]), oldest_head() or false, call('ZCARD', DEAD),
  call('ZCARD', SUSPECTS), call('XLEN', OUTBOX), call('ZCOUNT', ALIVE, now, '+inf'), served_models(),
  call('XLEN', CALLBACKS), call('ZCARD', DELAYED), due, deadline, living_offers(), living_parents(),
}
