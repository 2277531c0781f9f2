-- Suspects run in isolation: with no other jobs on their worker, before and after.

local isolate  -- the names used outside: a script may have 200 locals

do

-- A suspect that this worker may run once it is empty, its lease and what it needs; nil if it may not: it is of another
-- model, or costs more than the cache.
local function suspect_for_me(id)
  local job, why = load_job(id)
  if not job or job.state ~= 'queued' then
    call('ZREM', SUSPECTS, id)
    if not job then to_garbage(SUSPECTS, id .. ': ' .. why) end
    return
  end
  local lease = read_lease(id)
  if is_too_late(job, lease) or wait_for_model(job, lease) then return end
  local published = published_tokens(lease)
  local need = need_of(job.prompt + published, cost_of(job, published), job.choices)
  if need.cost <= request.cache or fits(need) then return job, lease, need end
end

local function take_suspect(id)
  local job, lease, need = suspect_for_me(id)
  if not job or #taken > 0 and not fits(need) then return end
  -- A job with a death in isolation runs alone, without other suspects.
  local is_alone = has_died_apart(job)
  if is_alone and #taken > 0 then return end
  local payload = read_payload(job)
  if not payload then return give_up_payload(job, lease) end
  is_over = is_alone
  leave_waiting(job, true)
  start(job, lease, payload, need, fits(need) and '' or 'h')
end

-- The worker that drains for suspects, if it still does: it pulls on meanwhile, and each pull renews this. One that was
-- quieted, has died or left pulls no more.
local function isolator()
  local who, until_ms = string.match(call('GET', ISOLATOR) or '', '^(%S+) (%d+)$')
  return who and tonumber(until_ms) > NOW and who or nil
end

local function drain_no_more()
  if isolator() == ME then call('DEL', ISOLATOR) end
end

local function take_suspects()
  for _, id in ipairs(call('ZRANGE', SUSPECTS, 0, LIMITS.MAX_SUSPECTS_PER_PULL - 1)) do
    if is_over then break end
    take_suspect(id)
  end
  drain_no_more()
  is_over = #taken > 0
  if is_over then call('HSET', MINE, 'apart', 1) end
end

-- Since when the first suspect has waited that this worker may take; nil if there is none.
local function mine_waits_since()
  local waiting = call('ZRANGE', SUSPECTS, 0, LIMITS.MAX_SUSPECTS_PER_PULL - 1, 'WITHSCORES')
  for i = 1, #waiting, 2 do
    if suspect_for_me(waiting[i]) then return tonumber(waiting[i + 1]) end
  end
end

-- After a suspect has waited too long, the next worker that pulls and may take it drains. Returns whether it is this one.
local function is_isolator(waiting_since)
  local who, longest_ms = isolator(), LIMITS.SUSPECT_WAIT_S * 1000
  if who ~= ME and (who or NOW - waiting_since < longest_ms) then return false end
  local since = mine_waits_since()
  if not since or who ~= ME and NOW - since < longest_ms then
    drain_no_more()
    return false
  end
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
