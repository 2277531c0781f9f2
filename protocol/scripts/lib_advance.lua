-- The part of an advance that only some rows need: ends, the first tokens of a job, broken keys.

dropped = {}

-- ---------------------------------------------------------------- arguments

local function present_number(value) return value > 0 and value or nil end
local function present_text(value) return value ~= '' and value or nil end
local function number_before(value) return value > 0 and value - 1 or nil end

-- The extras and the end of a progress, with the place behind them in the argument.
local function extras_from(scheduled, first_token, prompt, gap, fingerprint, resolved, at)
  return {
    scheduled = present_number(scheduled), first_token = present_number(first_token), prompt = number_before(prompt),
    gap = number_before(gap), fingerprint = present_text(fingerprint), resolved = present_text(resolved),
  }, at
end

-- ---------------------------------------------------------------- ends

local ENDS = { d = 'done', f = 'failed', c = 'cancelled', e = 'expired' }
local function end_from(
  letter, is_rejected, reason, message, code, result, record, output, retry_in, result_bytes, entry, at
)
  return {
    state = ENDS[letter], is_rejected = is_rejected == 1, reason = present_text(reason), error = present_text(message),
    error_code = present_text(code), result = present_text(result), record = record, output_tokens = output,
    retry_in = number_before(retry_in), result_bytes = number_before(result_bytes), entry = present_text(entry),
    is_silent = letter == 'd' and entry == '', incarnation = incarnation,
  }, ENDS[letter] and at
end

local function all_ended(lease)
  for at = 2, #lease, 2 do
    if lease[at] == 0 then return false end
  end
  return true
end

-- A job with a retryable failure is requeued until it has failed too often; then it ends with its last error.
local function is_retried(job, lease, how)
  if not how.retry_in then return false end
  -- It is flagged: end it with the requested state, on its channel too, instead of the failure.
  if lease.flag ~= '' then
    local reason = END_REASONS[lease.flag]
    how.state, how.error, how.error_code, how.entry = lease.flag, reason.error, reason.error_code, nil
    return false
  end
  return job.failures + 1 < setting('max_failures', LIMITS.DEFAULT_MAX_FAILURES)
end

local function retry(job, lease, how)
  job.error, job.error_code = how.error, how.error_code
  job.failures = job.failures + 1
  return_job(job, lease, 'retry', how.retry_in > 0 and NOW + how.retry_in or nil)
end

-- Returns an answer if this is not an ordinary end.
local function end_choice(job, lease, choice, how)
  if is_retried(job, lease, how) then
    retry(job, lease, how)
    forget_lease(job.id)
    return 'retried'
  end
  if how.is_silent then
    lease[2 * choice + 2] = 2
  elseif how.entry then
    write_end(job, lease, choice, how.state, how.entry)
  end
  if how.retry_in or all_ended(lease) then
    end_job(job, lease, how)
    return forget_lease(job.id)
  end
  changed[job.id] = lease
end

-- ---------------------------------------------------------------- broken keys

-- A key of the wrong type: the job cannot continue anywhere, so it ends in the dead set with that reason. If its row
-- is the wrong key, there is nothing to end: delete the lease.
local function broken(id, job, lease, reason)
  -- It cannot be ended while keys of the queue are wrong too: it stays with its owner, which gets the reason.
  if wrong_key(incarnation) then return 'broken ' .. reason end
  forget_lease(id)
  if not job then
    forget_lease_of_nothing(incarnation, id, reason)
    return 'broken ' .. reason
  end
  end_job(job, lease, { state = 'failed', error = reason, error_code = 'broken_key', incarnation = incarnation })
  return 'broken ' .. reason
end

-- ---------------------------------------------------------------- first tokens, forgiveness

-- The first measurements are kept, and the longest gap of this attempt. The exact number of prompt tokens replaces the
-- estimate. Model and resolved options are those of the attempt with the first tokens: one without any decided nothing.
local function note_extras(job, extras, lease, tokens)
  job.scheduled = job.scheduled or extras.scheduled or false
  job.first_token = job.first_token or extras.first_token or false
  job.prompt = extras.prompt or job.prompt
  local is_first = published_tokens(lease) == tokens
  job.fingerprint = is_first and extras.fingerprint or job.fingerprint or extras.fingerprint
  job.resolved = is_first and extras.resolved or job.resolved or extras.resolved
  if extras.gap then job.gap = math.max(job.gap or 0, extras.gap) end
  save(job)
end

-- Charge a tenant for a long output while it is generated: as if the job were admitted now, with its tokens so far and
-- the reserve.
local function charge_further(job, lease)
  if not job or not job.charged or MODE ~= 'fair' and not limits then return end
  local due = cost_of(job, published_tokens(lease))
  if due <= job.charged then return end
  charge_tenant(job, due - job.charged)
  job.charged = due
  save(job)
end

-- A result written in parts must be complete before its end is accepted.
local function has_all_parts(job, num_bytes)
  return not num_bytes or try('STRLEN', result_key(job)) == num_bytes
end

-- Progress clears the deaths: the job has passed the point at which its worker died.
local function clear_deaths(id, lease)
  local job = load_job(id)
  if job then
    job.deaths = nil
    save(job)
  end
  lease.deaths = 0
end

local function finish_ends()
  if #dropped > 0 then
    call_in_parts('HDEL', held_key(incarnation), dropped)
  end
  finish()
end

return {
  extras_from = extras_from, end_from = end_from, wrong_key = wrong_key, load_job = load_job, load_jobs = load_jobs,
  load_running = load_running, end_choice = end_choice, broken = broken, note_extras = note_extras,
  has_all_parts = has_all_parts, clear_deaths = clear_deaths, charge_further = charge_further, finish = finish_ends,
}
