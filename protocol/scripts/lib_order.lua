-- Take jobs from lanes, in the order of classes, tenants and heads.

-- The name used outside: a script may have 200 locals, and `pull` is near that limit.
local take_from_lanes

do

local AGE_STEP = age_step()
local oldest = {}  -- class -> submit time of its oldest head, or false if none waits
local skipped = {}  -- lanes whose head can never fit this worker, or is left to others, or that gave no job too often
local num_returned = 0  -- those of them in the class of returned jobs

-- Where a pull begins in a class. Jobs of a low class that were returned are no reason for a full worker to interrupt
-- others: it looks at a few of their lanes, each pull at other ones, and continues with the classes above its own.
local function first_of(class)
  if class ~= RETURNED or not request.over then return 0 end
  if num_returned >= LIMITS.MAX_RETURNED_PER_PULL then return nil end
  local num_lanes = call('ZCARD', PREFIX .. 'heads:' .. RETURNED) + num_returned
  if num_lanes <= LIMITS.MAX_RETURNED_PER_PULL then return 0 end
  return (request.number - 1) * LIMITS.MAX_RETURNED_PER_PULL % num_lanes
end

local function look_at(class)
  local first = is_sound_class(class) and first_of(class)
  local heads = first and call('ZRANGE', PREFIX .. 'heads:' .. class, first, first + 1, 'WITHSCORES') or {}
  local is_alone = first == 0 and not heads[3]
  oldest[class] = heads[2] and { tenant = heads[1], at = tonumber(heads[2]), is_alone = is_alone } or false
end

-- Among lanes with the least score, the one with the older head.
local function best_tenant(class)
  if class == RETURNED or MODE == 'fifo' or oldest[class].is_alone then return oldest[class].tenant end
  local listed = call('ZRANGE', PREFIX .. 'ready:' .. class, 0, LIMITS.MAX_LANES_PER_PULL - 1, 'WITHSCORES')
  local best, best_at
  for i = 1, #listed, 2 do
    if listed[i + 1] ~= listed[2] then break end
    local at = tonumber(call('ZSCORE', PREFIX .. 'heads:' .. class, listed[i]) or '') or NOW
    if not best or at < best_at then best, best_at = listed[i], at end
  end
  return best or oldest[class].tenant
end

-- ---------------------------------------------------------------- one lane

local buffers, num_lanes = {}, 0  -- of lanes that this pull has not skipped

-- Entries of a lane that this pull has read and not used. The first read is small, later ones are larger.
local function next_entry(lane)
  local buffer = buffers[lane.name]
  if not buffer then
    buffer = { entries = {}, at = 1, after = '-', size = 4 }
    buffers[lane.name] = buffer
    num_lanes = num_lanes + 1
  end
  if buffer.at > #buffer.entries then
    -- After an entry at the last possible id, which another user may add, XRANGE refuses to begin.
    local found = try('XRANGE', lane.key, buffer.after, '+', 'COUNT', buffer.size)
    buffer.entries, buffer.at = failed(found) and {} or found, 1
    buffer.size = LIMITS.SLICE_JOBS
    local last = buffer.entries[#buffer.entries]
    if last then buffer.after = '(' .. last[1] end
  end
  return buffer.entries[buffer.at], buffer
end

-- ---------------------------------------------------------------- the class

local best_class, note_share

do

-- Tokens that the classes below the highest may take: their share of what the highest has taken while they waited.
local LOWER = ':lower'
local SHARE_RATIO = LIMITS.LOWER_CLASSES_SHARE / (1 - LIMITS.LOWER_CLASSES_SHARE)

-- The highest class that waits, and of those below it the one with the highest effective priority: class plus age of
-- its oldest head by the step. An older head wins a tie.
local function first_classes()
  local highest, lower, lower_rank
  for class = LIMITS.MAX_PRIORITY, 0, -1 do
    local head = oldest[class]
    if head and not highest then
      highest = class
    elseif head then
      local rank = class + (NOW - head.at) / AGE_STEP
      if not lower or rank > lower_rank or rank == lower_rank and head.at < oldest[lower].at then
        lower, lower_rank = class, rank
      end
    end
  end
  return highest, lower
end

-- Whether the next job of a class costs no more than the share saved for it. `due_at`: the cost of that job, as far as
-- this pull knows it.
local due_at = 0
local function is_due(class)
  local share = served_of(LOWER)
  if share <= 0 or share < due_at then return false end
  local lane = open_lane(class, best_tenant(class))
  local entry = lane.is_sound and next_entry(lane)
  local head = entry and parse_entry(entry)
  due_at = head and need_of(head.prompt, head.cost, head.choices).cost or 0
  return share >= due_at
end

-- The class to serve next, and the share that each token of its next job adds, or takes. Without ageing, classes are
-- strict. The share is granted when a place is free: it is not a reason to interrupt a job.
function best_class()
  if oldest[RETURNED] then return RETURNED, 0 end
  local highest, lower = first_classes()
  if request.over and highest and highest <= request.over then return nil end
  if not lower or AGE_STEP == 0 then return highest, 0 end
  if not request.over and is_due(lower) then return lower, -1 end
  return highest, SHARE_RATIO
end

function note_share(tokens)
  if tokens == 0 then return end
  set_served(LOWER, served_of(LOWER) + tokens)
  if tokens < 0 then due_at = 0 end
end

end

-- ---------------------------------------------------------------- taking

local share_per_token = 0
local num_spoiled, has_spoiled = 0, false
local take, discard_foreign  -- the names used outside

do

-- Entries that gave no job. A lane may be full of them, since its tenant may write to it: after a few, this pull looks
-- at other lanes, and the next one continues.
local function spoil(lane)
  lane.num_spoiled = (lane.num_spoiled or 0) + 1
  num_spoiled = num_spoiled + 1
end

-- `finish` deletes all discarded entries of a lane at once.
local function discard(lane, entry, why)
  lane.gone[#lane.gone + 1] = entry[1]
  lane.has_lost = true
  if why then to_garbage(lane.key, why .. ': ' .. table.concat(entry[2], ' ')) end
end

-- Discard a foreign entry and those directly behind it that have been read; the first is noted.
function discard_foreign(lane, buffer)
  local entries, why = buffer.entries, 'not an entry of ours'
  repeat
    discard(lane, entries[buffer.at - 1], why)
    local is_next_foreign = entries[buffer.at] and not parse_entry(entries[buffer.at])
    buffer.at, why = is_next_foreign and buffer.at + 1 or buffer.at, nil
  until not is_next_foreign
  spoil(lane)
end

-- The job of an entry, if the job names this entry. Any other entry is a leftover of a failure.
local function job_of(lane, entry, id)
  local job, why = load_job(id)
  if not job then
    discard(lane, entry, why ~= 'unknown' and why or nil)
    spoil(lane)
  elseif job.entry ~= entry[1] or job.lane ~= lane.name or job.state ~= 'queued' then
    discard(lane, entry)
    spoil(lane)
    job = nil
  end
  return job
end

-- The tenant is charged with the cost at the first pull, at that after a requeue with what was not charged before, and
-- further while a long output is generated. The end corrects the charge.
local function charge_once(job)
  if MODE ~= 'fair' or job.charged and job.charged >= job.cost then return end
  local first = oldest[job.class]
  charge_at_start(job, first and first.is_alone and first.tenant)
  for class, head in pairs(oldest) do
    -- A tenant alone needs no position in this pull: `finish` writes it.
    if head and class ~= RETURNED and not head.is_alone then
      call('ZADD', PREFIX .. 'ready:' .. class, 'XX', served_of(job.tenant), job.tenant)
    end
  end
end

-- Wait for a worker with the job's model, or an engine that runs it. This is not an attempt.
local num_aside = 0
local function delay_for_worker(job, wait_ms)
  leave_waiting(job, false)
  count_waiting(job, 1)
  wait_until(job, NOW + wait_ms)
  write_place(job)
  num_aside = num_aside + 1
  if num_aside >= LIMITS.SLICE_JOBS then has_more = true end
end

function take(lane, entry, parsed, mark)
  local job = job_of(lane, entry, parsed.job)
  if not job then return end
  local lease = job.epoch > 0 and read_lease(job.id) or nil
  if is_too_late(job, lease) then return end
  local wait_ms = wait_for_worker(job, lease)
  if wait_ms then return delay_for_worker(job, wait_ms) end
  local payload = read_payload(job)
  if not payload then
    spoil(lane)
    return give_up_payload(job, lease)
  end
  leave_waiting(job, true)
  charge_once(job)
  start(job, lease, payload, parsed.need, mark)
  note_share(parsed.need.cost * share_per_token)
end

end

-- List the lane by its next head, so that the next choice is correct. A lane alone in its class needs no position:
-- `finish` lists its head once.
local function move_head(lane)
  local entry = next_entry(lane)
  local head = entry and parse_entry(entry)
  if head and oldest[lane.class] and oldest[lane.class].is_alone then
    oldest[lane.class].at = head.at
    return
  end
  if entry then list_head(lane, head) else unlist_lane(lane) end
  look_at(lane.class)
end

local function skip(lane)
  skipped[#skipped + 1] = lane
  if #skipped <= LIMITS.MAX_SKIPPED_PER_PULL then num_lanes = num_lanes - 1 end
  if lane.class == RETURNED then num_returned = num_returned + 1 end
  unlist_lane(lane)
  look_at(lane.class)
end

-- The first head that does not fit is held until there is room, and the pull ends: no job overtakes it here.
local function hold(lane, entry, parsed)
  if parsed.need.cost > request.cache then return skip(lane) end
  local num_before = #taken
  take(lane, entry, parsed, 'h')
  if #taken > num_before then is_over = true else has_more = true end
end

-- Whether a full worker leaves this job: it is not a reason to interrupt another, or idle workers are preferred. A
-- returned job has woken these. If no other worker lives, the job is not left.
local function is_left(lane, parsed)
  if not request.over then return false end
  if lane.class == RETURNED then
    local job = load_job(parsed.job)
    return job and job.class <= request.over
  end
  local ready_at = parsed.at + LIMITS.IDLE_FIRST_MS
  -- Since a future time: the clock has stepped back.
  if ready_at <= NOW or parsed.at > NOW then return false end
  request.num_alive = request.num_alive or call('ZCOUNT', ALIVE, '(' .. beat_time(), '+inf')
  if request.num_alive < 2 then return false end
  request.look_at = math.min(request.look_at or ready_at, ready_at)
  return true
end

-- Behind a returned job there may be one of a higher class; behind a head that came too late, all came later.
local num_left = 0
local function leave(lane, buffer)
  num_left = num_left + 1
  if lane.class ~= RETURNED or num_left > LIMITS.SLICE_JOBS then return skip(lane) end
  buffer.at = buffer.at + 1
end

-- An empty lane is removed from its class. One whose entries were all left to others is skipped.
local has_unlisted = false
local function end_lane(lane, buffer)
  lane.has_lost = true
  if lane.class == RETURNED and request.over and buffer.after ~= '-' then return skip(lane) end
  has_unlisted = true
  unlist_lane(lane)
  look_at(lane.class)
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
    is_over, has_more = true, #taken > 0 or has_unlisted
    return
  end
  if not entry then return end_lane(lane, buffer) end
  local parsed = parse_entry(entry)
  if parsed and is_left(lane, parsed) then return leave(lane, buffer) end
  if parsed then parsed.need = need_of(parsed.prompt, parsed.cost, parsed.choices) end
  if parsed and not fits(parsed.need) then return hold(lane, entry, parsed) end
  buffer.at = buffer.at + 1
  if parsed then take(lane, entry, parsed, '') else discard_foreign(lane, buffer) end
  if (lane.num_spoiled or 0) < LIMITS.MAX_SPOILED_PER_LANE then return move_head(lane) end
  has_spoiled = true
  skip(lane)
end

function take_from_lanes()
  look_at(RETURNED)
  for class = 0, LIMITS.MAX_PRIORITY do look_at(class) end
  while not is_slice_full() and num_spoiled < LIMITS.SLICE_JOBS do
    local class
    class, share_per_token = best_class()
    if not class then break end
    if not has_room() then break end
    take_head(class, best_tenant(class))
  end
  for _, lane in ipairs(skipped) do lane.has_lost = true end
  has_more = has_more or has_spoiled or num_spoiled >= LIMITS.SLICE_JOBS
end

end
