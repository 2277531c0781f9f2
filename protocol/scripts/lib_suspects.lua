-- Suspects run in isolation: with no other jobs on their worker, before and after.

local isolate  -- the name used outside

do

-- A suspect that this worker may run once it is empty, its lease and what it needs; nil if it may not: it is for a
-- worker of another model or engine, or costs more than the cache.
local function suspect_for_me(id)
  local job, why = load_job(id)
  if not job or job.state ~= 'queued' then
    call('ZREM', SUSPECTS, id)
    if not job then to_garbage(SUSPECTS, id .. ': ' .. why) end
    return
  end
  local lease = leases.of_row(job)
  if is_too_late(job, lease) or wait_for_worker(job, lease) then return end
  if limits and not limits.may_start(job.tenant) then return end
  local need = need_of(job)
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
  start(job, lease, payload, need, fits(need) and ' ' or 'h')
end

-- The worker that drains for suspects, if it still does: it pulls on meanwhile, and each pull renews this. One that was
-- quieted, has died or left pulls no more. The key also names the suspect that it drains for.
local function isolator()
  local who, until_ms = string.match(call('GET', ISOLATOR) or '', '^(%S+) (%d+)')
  local left_ms = who and tonumber(until_ms) - NOW
  -- One from before a step back of the clock has run out.
  return who and left_ms > 0 and left_ms <= LIMITS.HEARTBEAT_LIFETIME_S * 1000 and who or nil
end

local function drain_no_more()
  if isolator() == ME then call('DEL', ISOLATOR) end
end

-- The suspects that this pull examines: the one that this worker drains for, those that wait longest, and some others,
-- different ones in each pull, so that suspects that this worker may not take do not hide one that it may.
local function candidates()
  local size, from = LIMITS.MAX_SUSPECTS_PER_PULL, LIMITS.MAX_SUSPECTS_PER_PULL
  local ids, num_others = call('ZRANGE', SUSPECTS, 0, size - 1), call('ZCARD', SUSPECTS) - size
  if num_others > 0 then
    from = from + (request.number - 1) * size % num_others
    for _, id in ipairs(call('ZRANGE', SUSPECTS, from, from + size - 1)) do ids[#ids + 1] = id end
  end
  local who, drained_for = string.match(call('GET', ISOLATOR) or '', '^(%S+) %d+ (%S+)$')
  if who == ME and call('ZSCORE', SUSPECTS, drained_for) then table.insert(ids, 1, drained_for) end
  return ids
end

local function take_suspects()
  for _, id in ipairs(candidates()) do
    if is_over or num_taken() >= LIMITS.MAX_SUSPECTS_PER_PULL then break end
    take_suspect(id)
  end
  drain_no_more()
  is_over = #taken > 0
  if is_over then call('HSET', MINE, 'apart', 1) end
end

-- The first suspect that this worker may take, and since when it waits; nil if there is none.
local function first_of_mine()
  for _, id in ipairs(candidates()) do
    if suspect_for_me(id) then return id, tonumber(call('ZSCORE', SUSPECTS, id)) end
  end
end

-- Whether a suspect has waited for too long, also if it waits since a future time: the clock has stepped back.
local function is_impatient(since) return since > NOW or NOW - since >= LIMITS.SUSPECT_WAIT_S * 1000 end

-- After a suspect has waited too long, the next worker that pulls and may take it drains. Returns whether it is this
-- one.
local function is_isolator(waiting_since)
  local who = isolator()
  if who ~= ME and (who or not is_impatient(waiting_since)) then return false end
  local id, since = first_of_mine()
  if not id or who ~= ME and not is_impatient(since) then
    drain_no_more()
    return false
  end
  call('SET', ISOLATOR, string.format('%s %d %s', ME, NOW + LIMITS.HEARTBEAT_LIFETIME_S * 1000, id))
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
