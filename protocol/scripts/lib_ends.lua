-- The four ends of a job with all their effects.

-- The channel entry of an end that no worker wrote, as `encode_entry` would pack it: version, start, ids, text, time,
-- logprobs, end.
local function end_entry(offset, how)
  local finish = { state = how.state, error = how.error, error_code = how.error_code }
  return cmsgpack.pack({ 1, offset, {}, '', NOW, false, finish })
end

-- Write the end of one choice to its channel. The stream's check of ids prevents a second one.
local function write_end(job, lease, choice, state, packed)
  local at = 2 * choice + 1
  local id = text_of(lease[at]) .. '-' .. text_of(1 + job.requeues)
  local added = try('XADD', channel_key(job, choice), id, 'e', packed)
  if failed(added) then to_garbage(channel_key(job, choice), added.err) end
  lease[at + 1] = state == 'done' and 2 or 1
end

-- The fields of a batch that scripts use; its users may have added any number of others.
local BATCH_FIELDS = {
  'total', 'done', 'failed', 'cancelled', 'expired', 'closed', 'completed', 'url', 'deadline', 'began',
}

-- Jobs of a batch that have not ended, so that they can be ended in slices; the score is 1 once a job was asked to
-- stop.
local function members_key(batch) return PREFIX .. 'members:' .. batch end

local function join_members(job)
  local added = try('ZADD', members_key(job.batch), 0, job.id)
  if failed(added) then to_garbage(members_key(job.batch), added.err) end
end

-- The names used outside.
local complete_batch, count_in_batch, look_at_batch

do

-- Complete a batch that is closed and whose jobs in this partition have ended: write one callback entry per URL, if
-- requested. The reader joins the partitions, so a partition without jobs writes one too, and the batch is kept until
-- the last one has.
function complete_batch(batch, numbers, has_new_url)
  local ended = 0
  for _, state in ipairs({ 'done', 'failed', 'cancelled', 'expired' }) do
    ended = ended + (tonumber(numbers[state]) or 0)
  end
  if ended < (tonumber(numbers.total) or 0) then return end
  local is_wanted = numbers.closed == '1' and ((numbers.url or '') ~= '' or SETTINGS.export_batches == '1')
  local keep_ms = setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000)
  -- More jobs may come to an open one: its counts stay for them.
  local is_kept = is_wanted or numbers.closed ~= '1'
  call('PEXPIRE', batch_key(batch), is_kept and math.max(keep_ms, LIMITS.DEAD_TTL_S * 1000) or keep_ms)
  if numbers.closed ~= '1' or numbers.completed and not has_new_url then return end
  if not numbers.completed then call('HSET', batch_key(batch), 'completed', NOW) end
  call('ZREM', TIMERS, 'batch|' .. batch)
  if not is_wanted then return end
  call('XADD', CALLBACKS, '*', 'kind', 'batch', 'id', batch, 'at', NOW, 'total', numbers.total or 0,
    'done', numbers.done or 0, 'failed', numbers.failed or 0, 'cancelled', numbers.cancelled or 0,
    'expired', numbers.expired or 0, 'url', numbers.url or '')
end

-- Batch -> ids of its jobs that ended in this call, and their number by state. `finish` counts them.
local ended_in = {}

function count_in_batch(job)
  if not job.batch then return end
  look_at_batch(job.batch)
  local ended = ended_in[job.batch]
  ended.ids[#ended.ids + 1] = job.id
  ended.states[job.state] = (ended.states[job.state] or 0) + 1
end

-- `finish` completes the batch, also if none of its jobs ended.
function look_at_batch(batch) ended_in[batch] = ended_in[batch] or { ids = {}, states = {} } end

local function count_batch(batch, ended)
  local key = batch_key(batch)
  if #ended.ids > 0 then try('ZREM', members_key(batch), unpack(ended.ids)) end
  for state, num_jobs in pairs(ended.states) do
    if failed(try('HINCRBY', key, state, num_jobs)) then return to_garbage(key, 'a batch of the wrong type') end
  end
  local found, numbers = call('HMGET', key, unpack(BATCH_FIELDS)), {}
  for i, name in ipairs(BATCH_FIELDS) do numbers[name] = found[i] or nil end
  complete_batch(batch, numbers)
end

function count_batches()
  for batch, ended in pairs(ended_in) do count_batch(batch, ended) end
end

end

-- Emit the event of an end, or, with its version and time, that of an earlier one again. `how` as for `end_job`, or
-- also first_scheduled_ms and first_token_ms.
local function emit_end(job, how, version, at)
  local fields = {
    state = job.state, reason = how.reason, error = how.error, error_code = how.error_code, epoch = job.epoch,
    attempt = job.attempt, gap_ms = job.gap, incarnation = how.incarnation, record = how.record,
    first_scheduled_ms = how.first_scheduled_ms, first_token_ms = how.first_token_ms,
  }
  if SETTINGS.keep_results ~= '0' then
    -- The recorder reads a large result from its key: an outbox entry must stay small.
    local size = how.result and #how.result or how.result_bytes
    if how.result and size <= LIMITS.MAX_CALL_BYTES then fields.result = how.result else fields.result_bytes = size end
  end
  emit('ended', job, fields, version, at)
end

-- Set by an advance, which ends many jobs of one owner, to delete their leases in one command.
local dropped

-- How long channels are kept after the end: not beyond the job, whose id may then be used again. Its readers, and the
-- worker of the new job, would meet the old output.
local function channel_ttl_ms()
  local job_ms = setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000)
  return math.min(job_ms, setting('channel_ttl_ms', LIMITS.CHANNEL_TTL_S * 1000))
end

-- The only name used outside.
local end_job

do

-- A job that was never started has no channel yet: it gets that of its first choice alone, whose end counts for all. An
-- end takes 4 KB of memory, and a job may have many choices. A silent end leaves no
-- channel: a call that failed may have begun one.
local function close_channels(job, lease, how, keep_ms)
  if how.is_silent then
    deleted[#deleted + 1] = channel_key(job, 0)
    return
  end
  local num_channels = job.attempt > 0 and job.choices or 1
  for choice = 0, num_channels - 1 do
    if lease[2 * choice + 2] == 0 then
      write_end(job, lease, choice, how.state, end_entry(lease[2 * choice + 1], how))
    end
    call('PEXPIRE', channel_key(job, choice), text_of(keep_ms))
  end
  slice.num_channels = slice.num_channels + num_channels
end

-- The key is kept after the end of the job, with its final state, even if the job has expired.
local function keep_idempotency(job)
  if not job.key then return end
  local value = job.id .. ' ' .. job.state .. ' ' .. (job.digest or '')
  call('SET', idem_key(job), value, 'PX', setting('idempotency_ttl_ms', LIMITS.IDEMPOTENCY_TTL_S * 1000))
end

-- Keep a failed job in the dead set. At the limit, the oldest one is removed.
local function add_to_dead_set(job)
  call('PEXPIRE', payload_key(job), LIMITS.DEAD_TTL_S * 1000)
  call('ZADD', DEAD, NOW, job.id)
  if call('ZCARD', DEAD) <= setting('dead_set_max', LIMITS.DEAD_SET_MAX) then return end
  local oldest = call('ZPOPMIN', DEAD)[1]
  local forgotten = load_job(oldest)
  if not forgotten then return end
  save(forgotten, setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000))
  for _, key in ipairs({ payload_key(forgotten), result_key(forgotten) }) do
    call('PEXPIRE', key, setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000))
  end
  for choice = 0, forgotten.choices - 1 do
    call('PEXPIRE', channel_key(forgotten, choice), channel_ttl_ms())
  end
end

-- Whether a worker refused a job before it computed any of it. What it sends of a job that it has scheduled says when.
local function is_refused(job, lease, how)
  return how.state == 'failed' and how.incarnation and not job.scheduled and published_tokens(lease) == 0
end

-- The tenant was charged by an estimate: correct it.
local function settle(job, lease, how)
  if not job.charged or MODE ~= 'fair' and not limits then return end
  local computed = is_refused(job, lease, how) and 0 or job.prompt
  local true_tokens = computed + (how.output_tokens or published_tokens(lease))
  if true_tokens ~= job.charged then charge_tenant(job, true_tokens - job.charged) end
  -- A requeue continues from here, so that nothing is settled twice.
  job.charged = true_tokens
end

-- Delete parts that were written for an end that never came: they would be read as the result.
local function keep_result(job, how, keep_ms)
  if how.result then
    call('SET', result_key(job), how.result, 'PX', text_of(keep_ms))
  elseif how.result_bytes then
    call('PEXPIRE', result_key(job), text_of(keep_ms))
  else
    call('DEL', result_key(job))
  end
end

-- A channel without tokens has no more information than the state of the job, and takes as much memory as a full one.
local function channel_kept_ms(lease)
  local kept_ms = channel_ttl_ms()
  if published_tokens(lease) > 0 then return kept_ms end
  return math.min(kept_ms, LIMITS.EMPTY_CHANNEL_TTL_S * 1000)
end

local function drop_lease(job)
  if dropped then
    dropped[#dropped + 1] = job.id
  elseif job.owner ~= '' then
    try('HDEL', held_key(job.owner), job.id)
  end
  job.owner = ''
end

-- What only a waiting or running job needs.
local function forget_wait(job)
  job.entry, job.lane, job.number, job.before = false, false, 0, 0
  rows.set_rare(job.rare, 'previous', nil)
end

-- End a job in any of the four states, with all effects. `how`: state, reason, error, error_code; from a worker also
-- incarnation, result, record, output_tokens, is_rejected.
function end_job(job, lease, how)
  local was_running = job.state == 'running'
  if was_running then count_running(job.id, -1) else leave_waiting(job, false) end
  enter(job, how.state)
  lease = lease or leases.of_row(job)
  settle(job, lease, how)
  remove_timers(job)
  if lease.flag ~= '' then call('ZREM', TIMERS, 'stop|' .. job.id) end
  drop_lease(job)

  if how.state == 'cancelled' then how.error = job.asked or how.error end
  -- The dead set is for jobs that a requeue may fix.
  local is_dead = how.state == 'failed' and not how.is_rejected
  local keep_ms = is_dead and LIMITS.DEAD_TTL_S * 1000 or setting('result_ttl_ms', LIMITS.RESULT_TTL_S * 1000)
  close_channels(job, lease, how, is_dead and keep_ms or channel_kept_ms(lease))
  keep_result(job, how, keep_ms)
  if not is_dead then deleted[#deleted + 1] = payload_key(job) end
  local rare = job.rare
  job.ended, rare.published = NOW, offsets_of(lease)
  rare.ended_by = (how.incarnation or '') .. ':' .. text_of(lease.epoch)
  rows.set_rare(rare, 'reason', how.reason)
  rows.set_rare(rare, 'error', how.error)
  rows.set_rare(rare, 'error_code', how.error_code)
  rare.output = how.output_tokens or published_tokens(lease)
  if not is_dead then rows.set_rare(rare, 'resolved', nil) end
  forget_wait(job)
  save(job, keep_ms)
  if is_dead then add_to_dead_set(job) end
  keep_idempotency(job)
  count(job.state, 1)
  emit_end(job, how)
  if job.callback then
    call('XADD', CALLBACKS, '*', 'kind', 'job', 'id', job.id, 'at', NOW, 'state', job.state, 'version', job.version,
      'error', how.error or '', 'batch', job.batch or '', 'spec', job.spec or '', 'custom_id', job.custom_id or '',
      'line', job.line or '', 'submitted', job.submitted)
  end
  count_in_batch(job)
end

end

local END_REASONS = {
  cancelled = { error = 'The job was cancelled.', error_code = 'cancelled' },
  expired = { error = 'The job did not end before its deadline.', error_code = 'deadline' },
  unstarted = { error = 'The job waited longer than its time to live.', error_code = 'ttl' },
  batch_expired = { error = 'The job did not end before the deadline of its batch.', error_code = 'deadline' },
}

local function end_without_worker(job, lease, state, reason)
  end_job(job, lease, { state = state, error = reason.error, error_code = reason.error_code })
end

-- ---------------------------------------------------------------- running jobs that must stop

-- The names used outside.
local has_been_up_for, is_reported, stop

do

local uptime_ms

-- No heartbeat was renewed while Redis was down: right after its start, no worker counts as dead. The reported uptime
-- may be a second too high.
function has_been_up_for(ms)
  if not uptime_ms then
    local info = try('INFO', 'server')
    local uptime_s = not failed(info) and tonumber(string.match(info, 'uptime_in_seconds:(%d+)')) or 0
    uptime_ms = (uptime_s - 1) * 1000 + NOW - server_clock()
  end
  return uptime_ms >= ms
end

-- The parent process reported the end of the worker's process: it is neither slow nor disconnected.
function is_reported(incarnation) return call('HGET', worker_key(incarnation), 'reported') == '1' end

-- How long the heartbeat of an owner lives, and when by the server's clock it will have lived if none follows. The
-- clock of heartbeats stands still where no worker beats.
local function life_of(owner, job)
  local about = call('HMGET', worker_key(owner), 'life', 'beaten')
  local life = tonumber(about[1] or '') or LIMITS.HEARTBEAT_LIFETIME_S * 1000
  local seen = math.max(job.started or 0, whole(about[2], LIMITS.MAX_NUMBER) or 0)
  return life, math.min(seen, NOW) + life
end

-- Whether no process will act on a flag. An owner that is only slow loses the end of a job that was to stop anyway, so
-- this also goes by the server's clock, unlike a reclaim.
local function is_gone(owner, life, until_ms)
  if is_reported(owner) then return true end
  local expiry = tonumber(call('ZSCORE', ALIVE, owner) or '')
  local has_expired = expiry and expiry <= beat_time() or until_ms < NOW
  return has_expired and has_been_up_for(life + LIMITS.BEAT_EVERY_S * 1000)
end

-- A death that is seen later had this job as a mate, too.
local function note_stopped(owner)
  call('HINCRBY', worker_key(owner), 'stopped', 1)
  call('PEXPIRE', worker_key(owner), LIMITS.WORKER_KEPT_S * 1000)
end

-- Flag a running job: its owner gets the flag with its next advance or beat. If the owner is dead, end the job; a timer
-- looks whether it dies later. The first flag is kept. Returns whether the job ended.
function stop(job, lease, state, reason)
  local owner = lease.owner
  if lease.flag ~= '' then state, reason = lease.flag, END_REASONS[lease.flag] end
  local is_sound = is_type(worker_key(owner), 'hash') and is_type(held_key(owner), 'hash')
  local life, until_ms = LIMITS.HEARTBEAT_LIFETIME_S * 1000, NOW
  if is_sound then life, until_ms = life_of(owner, job) end
  if is_sound and is_gone(owner, life, until_ms) then
    note_stopped(owner)
    end_without_worker(job, lease, state, reason)
    return true
  end
  if lease.flag == '' then
    lease.flag = state
    leases.write(job, lease)
  end
  add_timer('stop', job, math.max(until_ms + 1, NOW + LIMITS.BEAT_EVERY_S * 1000))
  return false
end

end

-- ---------------------------------------------------------------- a whole batch

-- Close a batch and end a slice of its jobs: a waiting job and one of a dead owner at once, another running one by its
-- flag. A flagged job is not visited again. Returns how many ended, how many were flagged, and whether more may be
-- left.
local function end_batch(batch, state, reason, budget)
  local numbers = { ended = 0, asked = 0 }

  local function end_member(job)
    local lease = leases.of(job)
    if job.state ~= 'running' or not lease then
      end_without_worker(job, lease, state, reason)
      return 'ended'
    end
    if stop(job, lease, state, reason) then return 'ended' end
    if state == 'cancelled' then
      job.asked = reason.error
      save(job)
    end
    call('ZADD', members_key(batch), 1, job.id)
    return 'asked'
  end

  call('HSET', batch_key(batch), 'closed', 1)
  local ids = try('ZRANGEBYSCORE', members_key(batch), 0, 0, 'LIMIT', 0, budget)
  if failed(ids) then
    to_garbage(members_key(batch), ids.err)
    ids = {}
  end
  local num_seen = 0
  for _, id in ipairs(ids) do
    if slice.is_spent() then break end
    num_seen = num_seen + 1
    local job = load_job(id)
    if job and (job.state == 'queued' or job.state == 'running') and job.batch == batch then
      local how = end_member(job)
      numbers[how] = numbers[how] + 1
    else
      call('ZREM', members_key(batch), id)
    end
  end
  look_at_batch(batch)
  return numbers.ended, numbers.asked, #ids == budget or num_seen < #ids
end
