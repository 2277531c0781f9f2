-- Take jobs from lanes, in the order of classes, tenants and heads.

local take_from_lanes  -- the name used outside

do

-- ---------------------------------------------------------------- one lane

local buffers, num_lanes = {}, 0  -- of lanes that this pull has not skipped

-- Entries of a lane that this pull has read and not used, and the rows of their jobs. The first read is small, unless
-- no other lane waits; later ones are larger. A read with fewer entries than it may have was the last.
local function next_entry(lane, is_alone)
  local buffer = buffers[lane.name]
  if not buffer then
    local size = is_alone and math.min(LIMITS.PULL_JOBS, request.sequences) + 1 or 2
    buffer = { entries = {}, at = 1, after = '-', size = size, is_last = false }
    buffers[lane.name] = buffer
    num_lanes = num_lanes + 1
  end
  if buffer.at > #buffer.entries and not buffer.is_last then
    local found = try('XRANGE', lane.key, buffer.after, '+', 'COUNT', buffer.size)
    if failed(found) then
      -- After an entry at the last possible id, which another user may add, XRANGE refuses to begin. Whatever the
      -- reason is, what is left in the lane is not known.
      buffer.has_left = true
      if string.find(found.err, 'WRONGTYPE', 1, true) then lane.is_sound = false end
    end
    buffer.entries, buffer.at = failed(found) and {} or found, 1
    buffer.is_last = #buffer.entries < buffer.size
    buffer.size = LIMITS.SLICE_JOBS
    local ids = {}
    for i, one in ipairs(buffer.entries) do ids[i] = one[2][2] end
    load_jobs(ids)
    local last = buffer.entries[#buffer.entries]
    if last then buffer.after = '(' .. last[1] end
  end
  return buffer.entries[buffer.at], buffer
end

local function cost_of_head(class, tenant)
  local lane = open_lane(class, tenant)
  local entry = lane.is_sound and next_entry(lane)
  local head = entry and parse_entry(entry)
  local job = head and load_job(head.job)
  return job and need_of(job).cost or 0
end

-- ---------------------------------------------------------------- taking

local share_per_token = 0
local num_spoiled, has_spoiled = 0, false

-- Entries that gave no job. A lane may be full of them, since its tenant may write to it: after a few, this pull looks
-- at other lanes, and the next one continues.
local function spoil(lane)
  lane.num_spoiled = lane.num_spoiled + 1
  num_spoiled = num_spoiled + 1
end

-- `finish` deletes all discarded entries of a lane at once.
local function discard(lane, entry, why)
  lane.gone[#lane.gone + 1] = entry[1]
  lane.has_lost = true
  if why then to_garbage(lane.key, why .. ': ' .. table.concat(entry[2], ' ')) end
end

-- Discard a foreign entry and those directly behind it that have been read; the first is noted.
local function discard_foreign(lane, buffer)
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
  if job.charged and job.charged >= job.cost then return end
  if limits then limits.charge(job.tenant, job.cost - (job.charged or 0)) end
  if MODE == 'fair' then classes.charge(job) elseif limits then job.charged = job.cost end
end

-- Wait for a worker with the job's model, or an engine that runs it. This is not an attempt.
local num_aside = 0
local function delay_for_worker(job, wait_ms)
  leave_waiting(job, false)
  count_waiting(job, 1)
  wait_until(job, NOW + wait_ms)
  num_aside = num_aside + 1
  if num_aside >= LIMITS.SLICE_JOBS then has_more = true end
end

local function take(lane, job, need, mark)
  local lease = leases.of_row(job)
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
  start(job, lease, payload, need, mark)
  classes.note_share(need.cost * share_per_token)
end

-- ---------------------------------------------------------------- heads

-- The lane's position by its next head, so that the next choice is correct. An empty lane leaves the class; one whose
-- entries were all left to others is only passed over.
local has_emptied = false
local function move_head(listing, listed, lane)
  if limits and not limits.may_start(lane.tenant) then return classes.remove_tenant(lane.tenant) end
  local buffer = buffers[lane.name]
  -- Whether more entries follow does not matter any more.
  if buffer.at > #buffer.entries and not buffer.is_last and (is_slice_full() or not has_room()) then return end
  local entry = next_entry(lane)
  if not buffer.has_left then lane.head = entry or false end
  if not entry then
    has_emptied = has_emptied or lane.has_lost
    return classes.remove(listing, listed)
  end
  local head = parse_entry(entry)
  local at = head and head.at or NOW
  if lane.class == RETURNED or MODE ~= 'deadline' then
    return classes.move(listing, listed, at, MODE == 'fair' and lane.class ~= RETURNED and listed.score or at)
  end
  classes.move(listing, listed, at, score_of(lane, at, head and load_job(head.job)))
end

local num_skipped = 0
local function skip(listing, listed)
  num_skipped = num_skipped + 1
  if num_skipped <= LIMITS.MAX_SKIPPED_PER_PULL then num_lanes = num_lanes - 1 end
  classes.remove(listing, listed)
end

-- A job that can never fit this worker is left to others. The lane keeps its order: what is behind waits. Not so among
-- returned jobs, which are of all sizes: there it is set aside.
local function leave_to_larger(listing, listed, lane, buffer, job)
  if lane.class ~= RETURNED then return skip(listing, listed) end
  buffer.at = buffer.at + 1
  delay_for_worker(job, aside_ms())
  move_head(listing, listed, lane)
end

-- The first head that does not fit is held until there is room, and the pull ends: no job overtakes it here.
local function hold(listing, listed, lane, buffer, job, need)
  if need.cost > request.cache then return leave_to_larger(listing, listed, lane, buffer, job) end
  local num_before = #taken
  take(lane, job, need, 'h')
  if #taken > num_before then is_over = true else has_more = true end
end

-- Whether a full worker leaves this job: it is not a reason to interrupt another, or idle workers are preferred. A
-- returned job has woken these. If no other worker lives, the job is not left.
local function is_left(lane, job, at)
  if not request.over then return false end
  if lane.class == RETURNED then return job.class <= request.over end
  local ready_at = at + LIMITS.IDLE_FIRST_MS
  -- Since a future time: the clock has stepped back.
  if ready_at <= NOW or at > NOW then return false end
  request.num_alive = request.num_alive or call('ZCOUNT', ALIVE, '(' .. beat_time(), '+inf')
  if request.num_alive < 2 then return false end
  request.look_at = math.min(request.look_at or ready_at, ready_at)
  return true
end

-- Behind a returned job there may be one of a higher class; behind a head that came too late, all came later.
local num_left = 0
local function leave(listing, listed, lane, buffer)
  num_left = num_left + 1
  if lane.class ~= RETURNED or num_left > LIMITS.SLICE_JOBS then return skip(listing, listed) end
  buffer.at, buffer.has_left = buffer.at + 1, true
  if not next_entry(lane) then return skip(listing, listed) end
  move_head(listing, listed, lane)
end

local function take_head(listing, listed)
  local lane = open_lane(listing.class, listed.tenant)
  local entry, buffer = next_entry(lane, listing.is_alone)
  lane.head = nil
  if not lane.is_sound then
    to_garbage(lane.key, 'a lane of the wrong type')
    unlist_lane(lane)
    return classes.remove(listing, listed)
  end
  if num_lanes > LIMITS.MAX_LANES_PER_PULL then
    is_over, has_more = true, #taken > 0 or has_emptied
    return
  end
  if not entry then
    lane.has_lost = true
    return move_head(listing, listed, lane)
  end
  local parsed = parse_entry(entry)
  local job = parsed and job_of(lane, entry, parsed.job)
  if job and is_left(lane, job, parsed.at) then return leave(listing, listed, lane, buffer) end
  local need = job and need_of(job)
  if job and not fits(need) then return hold(listing, listed, lane, buffer, job, need) end
  buffer.at = buffer.at + 1
  if job then take(lane, job, need, ' ') elseif not parsed then discard_foreign(lane, buffer) end
  if lane.num_spoiled < LIMITS.MAX_SPOILED_PER_LANE then return move_head(listing, listed, lane) end
  has_spoiled = true
  skip(listing, listed)
end

function take_from_lanes()
  while not is_slice_full() and num_spoiled < LIMITS.SLICE_JOBS and has_room() do
    local listing, listed, share = classes.next(cost_of_head)
    if not listing then break end
    share_per_token = share
    take_head(listing, listed)
  end
  has_more = has_more or has_spoiled or num_spoiled >= LIMITS.SLICE_JOBS or #taken > 0 and classes.are_cut()
end

end
