-- include: lib_submitted
-- Republish the states of jobs to the history, from their hashes: for jobs whose row is missing or different.
--
-- KEYS: config.
-- ARGV[1]: packed array of {job id, version that the history has (0: none)}.
-- Reply: for each 1, or 0 if the job is unknown.
-- Reads: job, outbox, payload, result.
-- Writes: counters, job, outbox.
-- Bound: LIMITS.SLICE_JOBS jobs, with prompt and result of each.
--
-- The version is raised above that of the history, so that it accepts this event; later events of the job continue from
-- there.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local function emit_submitted_again(job)
  local payload = try('GET', payload_key(job))
  payload = not failed(payload) and payload or nil
  emit('submitted', job, submitted_fields(job, payload), 1, job.submitted)
end

-- The result of a job, or the size of one that is too large for an event: the recorder reads that from its key.
local function kept_result(job)
  if SETTINGS.keep_results == '0' then return nil end
  local size = try('STRLEN', result_key(job))
  if failed(size) or size == 0 then return nil end
  if size > LIMITS.MAX_CALL_BYTES then return nil, size end
  return call('GET', result_key(job))
end

local function emit_end_again(job)
  local result, result_bytes = kept_result(job)
  local how = {
    reason = job.reason, error = job.error, error_code = job.error_code, first_scheduled_ms = job.scheduled or nil,
    first_token_ms = job.first_token or nil, incarnation = string.match(job.ended_by or '', '^([^:]+):'),
    result = result, result_bytes = result_bytes,
  }
  emit_end(job, how, job.version, job.ended)
end

local function emit_state_again(job)
  if job.state == 'running' then
    emit('started', job, { epoch = job.epoch, attempt = job.attempt, incarnation = job.owner })
  elseif job.state ~= 'queued' then
    emit_end_again(job)
  elseif job.version > 1 then
    emit('returned', job, { why = 'audit', epoch = job.epoch })
  end
end

local function republish(id, known)
  local job = load_job(id)
  if not job then return 0 end
  if known >= job.version then
    job.version = known + 1
    save(job)
  end
  if known == 0 then emit_submitted_again(job) end
  emit_state_again(job)
  return 1
end

local asked = rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string', 'number')
for _, row in ipairs(asked) do
  if not whole(row[2], LIMITS.MAX_NUMBER) then return wrong_arguments() end
end

local answers = {}
for i, row in ipairs(asked) do answers[i] = republish(row[1], row[2]) end
finish()
return answers
