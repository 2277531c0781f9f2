-- include: lib_counts
-- Repair what the audit found: make lease and places of a job match the state in its hash. Checks each job again before
-- it writes, so it may be repeated, and may come late.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV[1]: packed array of job ids.
-- Reply: for each the action: '' (none needed), 'forgotten' (references to a missing job deleted), 'put back' (on its
--   lane, or delayed), 'returned' or, if flagged, 'ended' (it had no live owner), 'cleaned' (records that an ended or
--   waiting job must not have deleted), or 'broken' (its keys have the wrong type, and were not changed).

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local function forget_lease(id, lease)
  if not lease then return false end
  call('HDEL', LEASES, id)
  if lease[OWNER] ~= '' then call('HDEL', held_key(lease[OWNER]), id) end
  return true
end

local function leave_sets(id, also)
  local num_left = call('ZREM', SUSPECTS, id) + call('ZREM', DELAYED, id)
  return num_left + (also and call('ZREM', also, id) or 0) > 0
end

-- Without a lease, its channels have the offsets.
local function lease_from_channels(job)
  local lease = new_lease(job.choices)
  for choice = 0, job.choices - 1 do
    local last = try('XREVRANGE', channel_key(job, choice), '+', '-', 'COUNT', 1)
    local id = not failed(last) and last[1] and last[1][1] or '0-0'
    local tokens, ends = string.match(id, '^(%d+)-(%d+)$')
    lease[FIRST + 2 * choice] = tonumber(tokens)
    lease[FIRST + 2 * choice + 1] = tonumber(ends) > 0 and 1 or 0
  end
  lease[EPOCH] = job.epoch
  return lease
end

local function waits_until(job)
  if job.retry and job.retry > NOW then return 'retry', job.retry end
  if job.attempt == 0 and job.not_before and job.not_before > NOW then return 'not_before', job.not_before end
end

local function put_back(job, lease)
  job.entry, job.lane = nil, nil
  local kind, at = waits_until(job)
  if kind then
    call('ZADD', DELAYED, 0, job.id)
    add_timer(kind, job, at)
    write_place(job)
  elseif job.attempt > 0 or lease then
    enqueue_again(job, lease)
  else
    enqueue(job, job.class, job.submitted, nil)
  end
  return 'put back'
end

-- Without a timer, it would never become due.
local function is_due_never(job)
  if not call('ZSCORE', DELAYED, job.id) then return false end
  return not has_timer(job)
end

local function repair_queued(job, lease)
  local done = ''
  if lease and lease[OWNER] ~= '' then
    release_lease(job, lease)
    done = 'cleaned'
  end
  if entry_of(job) then return leave_sets(job.id) and 'cleaned' or done end
  if is_due_never(job) then
    call('ZREM', DELAYED, job.id)
    return put_back(job, lease)
  end
  if call('ZSCORE', SUSPECTS, job.id) or call('ZSCORE', DELAYED, job.id) then return done end
  return put_back(job, lease)
end

local function is_owned(job, lease)
  if not lease or lease[OWNER] == '' or lease[EPOCH] ~= job.epoch then return false end
  return call('HEXISTS', held_key(lease[OWNER]), job.id) == 1 and call('ZSCORE', ALIVE, lease[OWNER])
end

local function has_all_ends(lease)
  for at = FIRST + 1, #lease, 2 do
    if lease[at] == 0 then return false end
  end
  return true
end

-- End a job whose channels have their ends: its worker published all of it.
local function end_as_published(job, lease)
  local entry = call('XREVRANGE', channel_key(job, 0), '+', '-', 'COUNT', 1)[1]
  local finish = cmsgpack.unpack(entry[2][2])[7]
  local size = try('STRLEN', result_key(job))
  end_job(job, lease, {
    state = finish.state, error = finish.error or nil, error_code = finish.error_code or nil,
    result_bytes = not failed(size) and size > 0 and size or nil,
  })
  return 'ended'
end

local function repair_running(job, lease)
  local was_waiting = leave_sets(job.id)
  if is_owned(job, lease) then return was_waiting and 'cleaned' or '' end
  if not lease and has_all_ends(lease_from_channels(job)) then return end_as_published(job, lease_from_channels(job)) end
  lease = lease or lease_from_channels(job)
  lease[EPOCH] = job.epoch
  -- It has no owner that could act on the flag.
  if lease[FLAG] ~= '' then
    end_without_worker(job, lease, lease[FLAG], END_REASONS[lease[FLAG]])
    return 'ended'
  end
  return_job(job, lease, 'audit')
  return 'returned'
end

-- A requeue that failed may have deleted an end: the next one needs a higher id.
local function keep_ends_apart(job, choice)
  local about = try('XINFO', 'STREAM', channel_key(job, choice))
  local ends = not failed(about) and tonumber(string.match(as_map(about)['last-generated-id'], '%-(%d+)$')) or 0
  if ends <= job.requeues then return end
  job.requeues = ends
  call('HSET', job.hash, 'requeues', ends)
end

-- A reader of a channel without an end would wait for it.
local function end_channels(job)
  local lease, num_ended = lease_from_channels(job), 0
  for choice = 0, job.choices - 1 do
    local at = FIRST + 2 * choice
    if lease[at] > 0 and lease[at + 1] == 0 then
      keep_ends_apart(job, choice)
      write_end(job, lease, choice, job.state, end_entry(lease[at], job))
      local left_ms = call('PTTL', job.hash)
      call('PEXPIRE', channel_key(job, choice), left_ms > 0 and math.min(left_ms, channel_ttl_ms()) or channel_ttl_ms())
      num_ended = num_ended + 1
    end
  end
  return num_ended > 0
end

local function repair_ended(job, lease)
  local had_lease = forget_lease(job.id, lease)
  local was_placed = leave_sets(job.id, job.state ~= 'failed' and DEAD or nil)
  return (end_channels(job) or had_lease or was_placed) and 'cleaned' or ''
end

-- A batch lists its jobs that have not ended.
local function repair_membership(job)
  if not job.batch then return false end
  local is_listed = try('ZSCORE', members_key(job.batch), job.id)
  local is_open = job.state == 'queued' or job.state == 'running'
  if failed(is_listed) or (is_listed and true or false) == is_open then return false end
  if is_open then join_members(job) else call('ZREM', members_key(job.batch), job.id) end
  return true
end

local function repair_nothing(id, lease)
  local had_lease = forget_lease(id, lease)
  local was_placed = leave_sets(id, DEAD)
  return (had_lease or was_placed) and 'forgotten' or ''
end

local function repair(id)
  local job, why = load_job(id)
  local lease = read_lease(id)
  if why == 'unknown' then return repair_nothing(id, lease) end
  if not job then return 'broken' end
  local by_state = { queued = repair_queued, running = repair_running }
  local done = (by_state[job.state] or repair_ended)(job, lease)
  return repair_membership(job) and done == '' and 'cleaned' or done
end

local answers = {}
for i, id in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do answers[i] = repair(id) end
finish()
return answers
