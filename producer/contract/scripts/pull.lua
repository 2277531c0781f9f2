-- include: lib_timers lib_deaths
-- Take the first jobs that fit, leased, in one step: of the dead, of those returned, of the class and lane whose turn it is.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: incarnation, number, kv tokens, prefill tokens, sequences, cache tokens, is empty, holds one oversized, may
--   reclaim, reserve tokens (truths as 0 and 1).
-- Reply: {number, {job …}, last id of the bell, has more, is paused, drain, now, next timer or false}; a job is an array in
--   the order of `told`.
--
-- A pull is numbered: a number that was answered before gets the same jobs again, so a lost reply loses nothing; a lower
-- one is a late double and gets nothing.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local request = {
  incarnation = ARGV[1], number = tonumber(ARGV[2]), kv = tonumber(ARGV[3]), prefill = tonumber(ARGV[4]),
  sequences = tonumber(ARGV[5]), cache = tonumber(ARGV[6]), is_empty = ARGV[7] == '1', holds = ARGV[8] == '1',
  may_reclaim = ARGV[9] == '1', reserve = tonumber(ARGV[10]),
}
local ME, MINE = request.incarnation, worker_key(request.incarnation)

local taken, payload_bytes, has_more, is_over = {}, 0, false, false
local new_leases, new_held = {}, {}

-- ---------------------------------------------------------------- room

local function has_room() return request.kv > 0 and request.prefill > 0 and request.sequences > 0 end

local function fits(need)
  return need.cost <= request.kv and need.prompt <= request.prefill and need.choices <= request.sequences
end

local function spend(need)
  request.kv, request.prefill = request.kv - need.cost, request.prefill - need.prompt
  request.sequences = request.sequences - need.choices
end

-- A cost above what any job of this queue may have is an estimate that is too high: it is taken as the largest there can be.
local function need_of(prompt, cost, choices)
  local bound = math.min(cost, prompt + choices * request.reserve, setting('max_job_tokens', math.huge))
  return { prompt = math.min(prompt, bound), cost = bound, choices = choices }
end

-- The bite is over: whatever else fits waits for the next pull, which comes at once.
local function is_bite_over()
  if #taken >= LIMITS.MAX_BITE or payload_bytes >= LIMITS.MAX_CALL_BYTES then has_more = true end
  return has_more or is_over
end

-- ---------------------------------------------------------------- leasing one job

local function told(job, lease, payload, mark)
  local published, ended = {}, {}
  for at = FIRST, #lease, 2 do
    published[#published + 1] = lease[at]
    ended[#ended + 1] = lease[at + 1]
  end
  return {
    job.id, lease[EPOCH], job.attempt, job.class, job.spec, payload, job.seed, job.choices, job.submitted, job.started or NOW,
    job.deadline or false, job.prompt, published, ended, job.fingerprint or false, (mark == 'r' or mark == 'b') and 1 or 0,
    (mark == 'h' or mark == 'b') and 0 or 1, job.scheduled or false, job.first_token or false,
    lease[PREVIOUS] ~= '' and lease[PREVIOUS] or false,
  }
end

local function read_payload(job)
  local payload = try('GET', payload_key(job))
  if failed(payload) or not payload then return nil end
  return payload
end

-- Without its prompt a job can never run: it goes to the dead set, and its producer hears why.
local function give_up_payload(job, lease)
  end_job(job, lease, { state = 'failed', error = 'The prompt is gone from the queue.', error_code = 'payload_lost' })
end

-- queued -> running, for this incarnation, with the next epoch. `mark`: 'h' the held one that does not fit, 'r' reclaimed,
-- 'b' both.
local function start(job, lease, payload, need, mark)
  enter(job, 'running')
  job.attempt = (job.attempt or 0) + 1
  job.epoch = (job.epoch or 0) + 1
  lease = lease or new_lease(job.choices)
  lease[OWNER], lease[EPOCH] = ME, job.epoch
  job.started = NOW
  call('HSET', job.hash, 'state', 'running', 'version', job.version, 'attempt', job.attempt, 'epoch', job.epoch,
    'started', NOW, 'entry', '', 'lane', '')
  if job.attempt == 1 and job.ttl then call('ZREM', TIMERS, 'ttl|' .. job.id) end
  new_leases[#new_leases + 1], new_leases[#new_leases + 2] = job.id, cmsgpack.pack(lease)
  new_held[#new_held + 1], new_held[#new_held + 2] = job.id, request.number .. mark
  count('running_jobs', 1)
  emit('started', job, { epoch = job.epoch, attempt = job.attempt, incarnation = ME })
  taken[#taken + 1] = told(job, lease, payload, mark)
  payload_bytes = payload_bytes + #payload
  spend(need)
end

-- ---------------------------------------------------------------- lanes in their order

local AGE_STEP = setting('age_step_ms', LIMITS.DEFAULT_AGE_STEP_S * 1000)
local oldest = {}  -- class -> submit time of its oldest head, or false when nothing waits there

local function look_at(class)
  local head = call('ZRANGE', PREFIX .. 'heads:' .. class, 0, 0, 'WITHSCORES')
  oldest[class] = head[2] and { tenant = head[1], at = tonumber(head[2]) } or false
end

local skipped = {}  -- lanes whose head can never fit this worker: others may take it

-- The class with the highest effective priority: class plus age of its oldest head by the step. An older head wins a tie.
local function best_class()
  if oldest[RETURNED] then return RETURNED end
  local best, best_rank
  for class = LIMITS.MAX_PRIORITY, 0, -1 do
    local head = oldest[class]
    if head then
      local rank = class + (AGE_STEP > 0 and (NOW - head.at) / AGE_STEP or 0)
      if not best or rank > best_rank or rank == best_rank and head.at < oldest[best].at then
        best, best_rank = class, rank
      end
    end
  end
  return best
end

-- Among lanes with the least score, the one with the older head.
local function best_tenant(class)
  if class == RETURNED or MODE == 'fifo' then return oldest[class].tenant end
  local listed = call('ZRANGE', PREFIX .. 'ready:' .. class, 0, LIMITS.MAX_LANES_PER_PULL - 1, 'WITHSCORES')
  if #listed <= 2 then return listed[1] or oldest[class].tenant end
  local best, best_at
  for i = 1, #listed, 2 do
    if listed[i + 1] ~= listed[2] then break end
    local at = tonumber(call('ZSCORE', PREFIX .. 'heads:' .. class, listed[i]) or '') or NOW
    if not best or at < best_at then best, best_at = listed[i], at end
  end
  return best
end

-- ---------------------------------------------------------------- one lane

local buffers, num_lanes = {}, 0

-- Entries of a lane that this pull has read and not used: few at first, more when the lane goes on.
local function next_entry(lane)
  local buffer = buffers[lane.name]
  if not buffer then
    buffer = { entries = {}, at = 1, after = '-', size = 4 }
    buffers[lane.name] = buffer
    num_lanes = num_lanes + 1
  end
  if buffer.at > #buffer.entries then
    buffer.entries, buffer.at = call('XRANGE', lane.key, buffer.after, '+', 'COUNT', buffer.size), 1
    buffer.size = LIMITS.MAX_BITE
    local last = buffer.entries[#buffer.entries]
    if last then buffer.after = '(' .. last[1] end
  end
  return buffer.entries[buffer.at], buffer
end

local function parse(entry)
  local fields = as_map(entry[2])
  local prompt, cost, choices = tonumber(fields.prompt), tonumber(fields.cost), tonumber(fields.choices)
  if not (fields.job and prompt and cost and choices) then return nil end
  return { job = fields.job, need = need_of(prompt, cost, choices) }
end

local function discard(lane, entry, why)
  call('XDEL', lane.key, entry[1])
  lane.has_lost = true
  if why then to_garbage(lane.key, why .. ': ' .. table.concat(entry[2], ' ')) end
end

-- The job of an entry, if the entry is the one that the job names: any other is left over from something that went wrong.
local function job_of(lane, entry, id)
  local job, why = load_job(id)
  if not job then
    discard(lane, entry, why ~= 'unknown' and why or nil)
  elseif job.entry ~= entry[1] or job.lane ~= lane.name or job.state ~= 'queued' then
    discard(lane, entry)
    job = nil
  end
  return job
end

local function charge_once(job)
  if MODE ~= 'fair' or job.charged then return end
  call('HSET', SERVED, VIRTUAL_TIME, served_of(job.tenant))
  charge(job.tenant, job.cost)
  call('HSET', job.hash, 'charged', job.cost)
end

local function take(lane, entry, parsed, mark)
  local job = job_of(lane, entry, parsed.job)
  if not job then return end
  local lease = (job.epoch or 0) > 0 and read_lease(job.id) or nil
  local payload = read_payload(job)
  if not payload then return give_up_payload(job, lease) end
  leave_waiting(job, true)
  charge_once(job)
  start(job, lease, payload, parsed.need, mark)
end

-- Point the class at the lane's next head, so that the next choice is right.
local function move_head(lane)
  local entry = next_entry(lane)
  if entry then
    local at, id = head_time(entry)
    local head = MODE == 'deadline' and id and load_job(id) or nil
    list_lane(lane, at, score_of(lane, at, head))
  else
    unlist_lane(lane)
  end
  look_at(lane.class)
end

-- The first head that does not fit becomes the one held job, and the pull ends: nothing overtakes it here.
local function hold(lane, entry, parsed)
  if parsed.need.cost > request.cache then
    skipped[#skipped + 1] = lane
    unlist_lane(lane)
    return look_at(lane.class)
  end
  take(lane, entry, parsed, 'h')
  is_over = true
end

local function take_head(class, tenant)
  local lane = open_lane(class, tenant)
  if not lane.is_sound then
    to_garbage(lane.key, 'a lane of the wrong type')
    unlist_lane(lane)
    return look_at(class)
  end
  local entry, buffer = next_entry(lane)
  if num_lanes > LIMITS.MAX_LANES_PER_PULL then
    is_over, has_more = true, #taken > 0
    return
  end
  if not entry then
    lane.has_lost = true
    unlist_lane(lane)
    return look_at(class)
  end
  local parsed = parse(entry)
  if parsed and not fits(parsed.need) then return hold(lane, entry, parsed) end
  buffer.at = buffer.at + 1
  if parsed then take(lane, entry, parsed, '') else discard(lane, entry, 'not an entry of ours') end
  move_head(lane)
end

local function take_from_lanes()
  look_at(RETURNED)
  for class = 0, LIMITS.MAX_PRIORITY do look_at(class) end
  while not is_bite_over() do
    local class = best_class()
    if not class then break end
    if not has_room() then break end
    take_head(class, best_tenant(class))
  end
  for _, lane in ipairs(skipped) do lane.has_lost = true end
end

-- ---------------------------------------------------------------- jobs of the dead

-- A Redis that was away renewed no life: right after its start nobody is dead. The reported uptime may be a second high.
local function has_been_up_for(ms)
  local info = try('INFO', 'server')
  if failed(info) then return false end
  local uptime_s = tonumber(string.match(info, 'uptime_in_seconds:(%d+)')) or 0
  return (uptime_s - 1) * 1000 + NOW - server_clock() >= ms
end

local function the_dead()
  local dead = {}
  for _, incarnation in ipairs(call('ZRANGEBYSCORE', ALIVE, '-inf', NOW, 'LIMIT', 0, LIMITS.MAX_DEAD_PER_PULL)) do
    if incarnation ~= ME then dead[#dead + 1] = incarnation end
  end
  return dead
end

local function about_death(incarnation)
  local key = worker_key(incarnation)
  local num_held = call('HLEN', held_key(incarnation))
  -- Mates are counted once, when the death is first seen: later some have been moved.
  call('HSETNX', key, 'mates', math.max(0, num_held - 1))
  local about = call('HMGET', key, 'mates', 'apart', 'farewell', 'life')
  return {
    incarnation = incarnation, mates = tonumber(about[1]) or 0, is_apart = about[2] == '1', is_farewell = about[3] == '1',
    life = tonumber(about[4] or '') or LIMITS.LIFE_S * 1000,
  }
end

-- Deaths since the job last made progress, with this one, which is listed once however often the job is looked at.
local function deaths_with(job, lease, death)
  local deaths = deaths_of(job)
  for _, one in ipairs(deaths) do
    if one.incarnation == death.incarnation then return deaths end
  end
  deaths = list_death(job, lease, { incarnation = death.incarnation, mates = death.mates, is_apart = death.is_apart })
  write_lease(job.id, lease)
  return deaths
end

-- True when the death settles where the job goes: to the dead set, or among the suspects.
local function is_settled_by_death(job, lease, death)
  if death.is_farewell then return false end
  local deaths = deaths_with(job, lease, death)
  if num_alone(deaths) >= 2 then
    end_job(job, lease, {
      state = 'failed', error_code = 'killed_its_worker',
      error = 'The worker process died twice while it ran this job alone.',
    })
    return true
  end
  if #deaths < 2 then return false end
  return_job(job, lease, 'suspect')
  return true
end

-- The bite holds no more of the dead's jobs, or one of them is held: the rest stays theirs.
local function move_to_me(job, lease, death)
  local published = published_tokens(lease)
  local need = need_of(job.prompt + published, cost_of(job, published), job.choices)
  local mark = 'r'
  if not fits(need) then
    if request.holds or need.cost > request.cache then return end
    mark, is_over = 'b', true
  end
  local payload = read_payload(job)
  if not payload then return give_up_payload(job, lease) end
  call('HDEL', held_key(death.incarnation), job.id)
  enter(job, 'queued')
  count('running_jobs', -1)
  emit('returned', job, { why = death.is_farewell and 'farewell' or 'death', epoch = lease[EPOCH] })
  lease[PREVIOUS] = death.incarnation
  start(job, lease, payload, need, mark)
end

local function reclaim_job(id, death)
  local lease = read_lease(id)
  if not lease or lease[OWNER] ~= death.incarnation then return call('HDEL', held_key(death.incarnation), id) end
  local job, why = load_job(id)
  if not job then return forget_lease_of_nothing(id, lease, why) end
  if lease[FLAG] ~= '' then return end_unheard(job, lease, lease[FLAG], SAID[lease[FLAG]]) end
  if is_settled_by_death(job, lease, death) then return end
  move_to_me(job, lease, death)
end

-- Move what fits; the dead leaves `alive` when it holds nothing more.
local function reclaim_from(incarnation, budget)
  local death = about_death(incarnation)
  if not has_been_up_for(death.life + LIMITS.BEAT_EVERY_S * 1000) then return 0 end
  local ids, num_seen = call('HKEYS', held_key(incarnation)), 0
  for _, id in ipairs(ids) do
    if num_seen >= budget or is_bite_over() then break end
    num_seen = num_seen + 1
    reclaim_job(id, death)
  end
  if call('EXISTS', held_key(incarnation)) == 0 then call('ZREM', ALIVE, incarnation) end
  return num_seen
end

local function reclaim()
  if not request.may_reclaim or request.holds then return end
  local budget = LIMITS.MAX_BITE
  for _, incarnation in ipairs(the_dead()) do
    if budget <= 0 or is_bite_over() then break end
    budget = budget - reclaim_from(incarnation, budget)
  end
  if budget <= 0 then has_more = true end
end

-- ---------------------------------------------------------------- suspects

local function take_suspect(id)
  local job, why = load_job(id)
  if not job or job.state ~= 'queued' then
    call('ZREM', SUSPECTS, id)
    if not job then to_garbage(SUSPECTS, id .. ': ' .. why) end
    return
  end
  -- One that has died apart runs quite alone.
  if has_died_apart(job) then
    if #taken > 0 then return end
    is_over = true
  end
  local lease = read_lease(id)
  local published = published_tokens(lease)
  local need = need_of(job.prompt + published, cost_of(job, published), job.choices)
  local is_first = #taken == 0
  if not fits(need) and not (is_first and need.cost <= request.cache) then return end
  local payload = read_payload(job)
  if not payload then return give_up_payload(job, lease) end
  leave_waiting(job, true)
  start(job, lease, payload, need, fits(need) and '' or 'h')
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
  if call('GET', ISOLATOR) == ME then call('DEL', ISOLATOR) end
end

local function is_alive(incarnation)
  local expiry = call('ZSCORE', ALIVE, incarnation)
  return expiry and tonumber(expiry) > NOW
end

-- When a suspect has waited too long, the next worker to pull drains first. Returns whether that is this one.
local function is_isolator(waiting_since)
  local who = call('GET', ISOLATOR)
  if who == ME then return true end
  if NOW - waiting_since < LIMITS.SUSPECT_WAIT_S * 1000 or who and is_alive(who) then return false end
  call('SET', ISOLATOR, ME)
  return true
end

-- Suspects run apart: with nothing else here, before and after. Returns whether this worker must drain for them.
local function isolate(holds_nothing)
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

-- ---------------------------------------------------------------- the pull

local function tell_again()
  local flat = call('HGETALL', held_key(ME))
  for i = 1, #flat, 2 do
    local id = flat[i]
    local number, mark = string.match(flat[i + 1], '^(%d+)(%a?)$')
    if tonumber(number) == request.number then
      local lease, job = read_lease(id), load_job(id)
      local payload = job and read_payload(job)
      if lease and payload and lease[OWNER] == ME then taken[#taken + 1] = told(job, lease, payload, mark) end
    end
  end
  has_more = true
end

-- An incarnation that was never seen begins to live; one whose life is over takes nothing until it beats again.
local function lives()
  local expiry = call('ZSCORE', ALIVE, ME)
  if expiry then return tonumber(expiry) > NOW end
  call('ZADD', ALIVE, NOW + LIMITS.LIFE_S * 1000, ME)
  return true
end

local function remember()
  if #new_leases == 0 then return end
  call('HSET', LEASES, unpack(new_leases))
  call('HSET', held_key(ME), unpack(new_held))
  call('HSET', MINE, 'pull', request.number)
  call('PEXPIRE', MINE, LIMITS.WORKER_KEPT_S * 1000)
end

local function take_what_fits()
  local num_held = call('HLEN', held_key(ME))
  local is_apart = call('HGET', MINE, 'apart') == '1'
  if is_apart and num_held > 0 then return false end
  if is_apart then call('HDEL', MINE, 'apart') end
  local must_drain = isolate(num_held == 0)
  if must_drain or is_over then return must_drain end
  if request.holds or not has_room() then return false end
  reclaim()
  take_from_lanes()
  return false
end

local function pull()
  fire_timers()
  if SETTINGS.paused == '1' then return false end
  local last = tonumber(call('HGET', MINE, 'pull') or '') or 0
  if request.number == last then
    tell_again()
    return false
  end
  if request.number < last or not lives() then return false end
  return take_what_fits()
end

local must_drain = pull()
remember()
finish()
local bell = call('XREVRANGE', BELL, '+', '-', 'COUNT', 1)[1]
return {
  request.number, taken, bell and bell[1] or '0-0', has_more and 1 or 0, SETTINGS.paused == '1' and 1 or 0,
  must_drain and 1 or 0, NOW, next_timer() or false,
}
