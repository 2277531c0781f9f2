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

local function repair_running(job, lease)
  local was_waiting = leave_sets(job.id)
  if is_owned(job, lease) then return was_waiting and 'cleaned' or '' end
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

local function repair_ended(job, lease)
  local had_lease = forget_lease(job.id, lease)
  local was_placed = leave_sets(job.id, job.state ~= 'failed' and DEAD or nil)
  return (had_lease or was_placed) and 'cleaned' or ''
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
  if job.state == 'queued' then return repair_queued(job, lease) end
  if job.state == 'running' then return repair_running(job, lease) end
  return repair_ended(job, lease)
end

local answers = {}
for i, id in ipairs(rows_of(ARGV[1], 'string')) do answers[i] = repair(id) end
finish()
return answers
