-- Suspects run in isolation: with no other jobs on their worker, before and after.

local isolate  -- the names used outside: a script may have 200 locals

do

local function take_suspect(id)
  local job, why = load_job(id)
  if not job or job.state ~= 'queued' then
    call('ZREM', SUSPECTS, id)
    if not job then to_garbage(SUSPECTS, id .. ': ' .. why) end
    return
  end
  local lease = read_lease(id)
  if is_too_late(job, lease) or wait_for_model(job, lease) then return end
  -- A job with a death in isolation runs alone, without other suspects.
  if has_died_apart(job) then
    if #taken > 0 then return end
    is_over = true
  end
  local published = published_tokens(lease)
  local need = need_of(job.prompt + published, cost_of(job, published), job.choices)
  local is_first = #taken == 0
  if not fits(need) and not (is_first and need.cost <= request.cache) then return end
  local payload = read_payload(job)
  if not payload then return give_up_payload(job, lease) end
  leave_waiting(job, true)
  start(job, lease, payload, need, fits(need) and '' or 'h')
end

-- The worker that drains for suspects, if it still does: it pulls on meanwhile, and each pull renews this. One that was
-- quieted, has died or left pulls no more.
local function isolator()
  local who, until_ms = string.match(call('GET', ISOLATOR) or '', '^(%S+) (%d+)$')
  return who and tonumber(until_ms) > NOW and who or nil
end

local function take_suspects()
  for _, id in ipairs(call('ZRANGE', SUSPECTS, 0, LIMITS.MAX_SUSPECTS_PER_PULL - 1)) do
    if is_over then break end
    take_suspect(id)
  end
  if #taken == 0 then
    is_over = false
    return
  end
  is_over = true
  call('HSET', MINE, 'apart', 1)
  if isolator() == ME then call('DEL', ISOLATOR) end
end

-- After a suspect has waited too long, the next worker that pulls drains. Returns whether it is this one.
local function is_isolator(waiting_since)
  local who = isolator()
  if who ~= ME and (who or NOW - waiting_since < LIMITS.SUSPECT_WAIT_S * 1000) then return false end
  call('SET', ISOLATOR, string.format('%s %d', ME, NOW + LIMITS.HEARTBEAT_LIFETIME_S * 1000))
  return true
end

-- Take suspects if this worker is empty. Returns whether it must be drained for them.
function isolate(holds_nothing)
  local first = call('ZRANGE', SUSPECTS, 0, 0, 'WITHSCORES')
  if not first[2] then
    if call('EXISTS', ISOLATOR) == 1 then call('DEL', ISOLATOR) end
    return false
  end
  if request.is_empty and holds_nothing then
    take_suspects()
    return false
  end
  return is_isolator(tonumber(first[2]))
end

end
