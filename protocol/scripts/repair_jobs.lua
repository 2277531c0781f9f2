-- include: lib_counts
-- Repair what the audit found: make lease and places of a job match the state in its row. Checks each job again before
-- it writes, so it may be repeated, and may come late.
--
-- KEYS: config.
-- ARGV[1]: packed array of {job id, incarnations whose lists of leases were seen to have it}.
-- Reply: for each the action: '' (none needed), 'forgotten' (references to a missing job deleted), 'put back' (on its
--   lane, or delayed), 'returned' or, if flagged, 'ended' (it had no live owner), 'cleaned' (records that an ended or
--   waiting job must not have deleted), or 'broken' (its keys have the wrong type, and were not changed).
-- Reads: alive, batch, buckets, channel, dead, delayed, depth, heads, held, job, lane, leased, limits, members, outbox,
--   parked, ready, result, served, suspects, tenants, timers, weights.
-- Writes: batch, bell, buckets, callbacks, channel, counters, dead, delayed, depth, garbage, heads, held, idem, job,
--   lane, leased, members, outbox, parked, payload, ready, result, served, suspects, tenants, timers.
-- Bound: LIMITS.SLICE_JOBS jobs, with LIMITS.MAX_CHOICES channels and the named incarnations of each.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

-- Delete the leases of incarnations that do not own the job.
local function forget_leases(id, owner, holders)
  local num_gone = 0
  for _, holder in ipairs(holders) do
    if type(holder) == 'string' and holder ~= owner and is_type(held_key(holder), 'hash') then
      num_gone = num_gone + call('HDEL', held_key(holder), id)
    end
  end
  return num_gone > 0
end

local function leave_sets(id, also)
  local num_left = call('ZREM', SUSPECTS, id) + call('ZREM', DELAYED, id)
  return num_left + (also and call('ZREM', also, id) or 0) > 0
end

-- Without a lease, its channels have the offsets.
local function lease_from_channels(job)
  local lease = leases.new(job.choices)
  for choice = 0, job.choices - 1 do
    local last = try('XREVRANGE', channel_key(job, choice), '+', '-', 'COUNT', 1)
    local id = not failed(last) and last[1] and last[1][1] or '0-0'
    local tokens, ends = string.match(id, '^(%d+)-(%d+)$')
    lease[2 * choice + 1] = tonumber(tokens)
    lease[2 * choice + 2] = tonumber(ends) > 0 and 1 or 0
  end
  lease.epoch = job.epoch
  return lease
end

local function waits_until(job)
  if job.retry and job.retry > NOW then return 'retry', job.retry end
  if job.attempt == 0 and job.not_before and job.not_before > NOW then return 'not_before', job.not_before end
end

local function put_back(job)
  local lease = leases.of_row(job)
  job.entry, job.lane = false, false
  local kind, at = waits_until(job)
  if kind then
    call('ZADD', DELAYED, 0, job.id)
    add_timer(kind, job, at)
    save(job)
  elseif job.attempt > 0 or published_tokens(lease) > 0 then
    enqueue_again(job, lease)
  else
    enqueue(job, job.class, job.submitted, lease)
  end
  return 'put back'
end

-- Without a timer, it would never become due.
local function is_due_never(job)
  if not call('ZSCORE', DELAYED, job.id) then return false end
  return not has_timer(job)
end

local function repair_queued(job)
  if entry_of(job) then return leave_sets(job.id) and 'cleaned' or '' end
  if is_due_never(job) then
    call('ZREM', DELAYED, job.id)
    return put_back(job)
  end
  if call('ZSCORE', SUSPECTS, job.id) or call('ZSCORE', DELAYED, job.id) then return '' end
  return put_back(job)
end

local function is_owned(job, lease)
  return lease and lease.epoch == job.epoch and call('ZSCORE', ALIVE, job.owner)
end

local function has_all_ends(lease)
  for at = 2, #lease, 2 do
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

local function repair_running(job)
  local was_waiting, lease = leave_sets(job.id), leases.held(job)
  if is_owned(job, lease) then return was_waiting and 'cleaned' or '' end
  if not lease and has_all_ends(lease_from_channels(job)) then
    return end_as_published(job, lease_from_channels(job))
  end
  lease = lease or lease_from_channels(job)
  lease.epoch = job.epoch
  -- It has no owner that could act on the flag.
  if lease.flag ~= '' then
    end_without_worker(job, lease, lease.flag, END_REASONS[lease.flag])
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
  save(job)
end

-- A reader of a channel without an end would wait for it.
local function end_channels(job)
  local lease, num_ended = lease_from_channels(job), 0
  for choice = 0, job.choices - 1 do
    local at = 2 * choice + 1
    if lease[at] > 0 and lease[at + 1] == 0 then
      keep_ends_apart(job, choice)
      write_end(job, lease, choice, job.state, end_entry(lease[at], job))
      local left_ms = call('PTTL', row_key(job))
      call('PEXPIRE', channel_key(job, choice), left_ms > 0 and math.min(left_ms, channel_ttl_ms()) or channel_ttl_ms())
      num_ended = num_ended + 1
    end
  end
  return num_ended > 0
end

local function repair_ended(job)
  local was_placed = leave_sets(job.id, job.state ~= 'failed' and DEAD or nil)
  return (end_channels(job) or was_placed) and 'cleaned' or ''
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

local function repair(id, holders)
  local job, why = load_job(id)
  local owner = job and job.state == 'running' and job.owner
  local had_leases = (job or why == 'unknown') and forget_leases(id, owner, holders)
  if why == 'unknown' then return (leave_sets(id, DEAD) or had_leases) and 'forgotten' or '' end
  if not job then return 'broken' end
  local by_state = { queued = repair_queued, running = repair_running }
  local done = (by_state[job.state] or repair_ended)(job)
  local was_listed = repair_membership(job)
  return done == '' and (was_listed or had_leases) and 'cleaned' or done
end

local answers = {}
for i, row in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string', 'table')) do answers[i] = repair(row[1], row[2]) end
finish()
return answers
