-- Append the tokens and ends of one step to the channels of many choices, each checked wholly before it is written.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV[1]: incarnation. ARGV[2]: packed array of progress, each {job, epoch, choice, from, tokens, entry, extras, end}:
--   extras (or nil) {first scheduled, first token, prompt tokens, fingerprint}; end (or nil) in the order of `how_of`.
-- Reply: for each one text: 'ok', 'already', 'at <n>' (send again from n), 'replaced', 'broken <reason>'; and
--   'ok <state>', 'already <state>' when the job is flagged.
--
-- Only the lease decides: it must name this incarnation and epoch, and `from` must be its offset. So nothing that a
-- worker sends after it was replaced is written, and nothing is written twice. The entry's id, `<offset after it>-0`,
-- is the server's own wall behind that.

write_even_when_full()

local incarnation = ARGV[1]
local rows = cmsgpack.unpack(ARGV[2])

-- Tokens alone touch channels and leases, whose types show when they are read or tried. An end touches the queue's
-- keys.
local function has_end()
  for i = 1, #rows do
    if rows[i][8] then return true end
  end
  return false
end
local wrong = has_end() and wrong_key(incarnation)
if wrong then return wrong end

-- ---------------------------------------------------------------- leases: read in one command, written in one

local leases, changed = {}, {}
dropped = {}

local function read_leases()
  local ids = {}
  for i = 1, #rows do ids[i] = rows[i][1] end
  local packed = call('HMGET', LEASES, unpack(ids))
  for i = 1, #ids do
    local id = ids[i]
    if packed[i] and not leases[id] then leases[id] = cmsgpack.unpack(packed[i]) end
  end
end

-- Offsets are written after all appends: no other script can look in between, and a crash keeps the whole call or
-- nothing.
local function write_leases()
  local flat = {}
  for id, lease in pairs(changed) do
    flat[#flat + 1] = id
    flat[#flat + 1] = cmsgpack.pack(lease)
  end
  if #flat > 0 then call('HSET', LEASES, unpack(flat)) end
  if #dropped > 0 then
    call('HDEL', LEASES, unpack(dropped))
    call('HDEL', held_key(incarnation), unpack(dropped))
  end
end

local function forget_lease(id) leases[id], changed[id] = nil, nil end

-- ---------------------------------------------------------------- ends

local function how_of(row)
  return {
    state = row[1], reason = row[2], error = row[3], error_code = row[4], result = row[5], record = row[6],
    output_tokens = row[7], retry_in = row[8], entry = row[9], result_bytes = row[10], incarnation = incarnation,
  }
end

local function all_ended(lease)
  for at = FIRST + 1, #lease, 2 do
    if lease[at] == 0 then return false end
  end
  return true
end

-- A retryable failure goes back to the stream until it has failed too often; then it ends with its last error.
local function is_retried(job, lease, how)
  if not how.retry_in then return false end
  -- It was asked to end: that is what it does instead, and what its channel says, not that it failed.
  if lease[FLAG] ~= '' then
    local said = SAID[lease[FLAG]]
    how.state, how.error, how.error_code, how.entry = lease[FLAG], said.error, said.error_code, nil
    return false
  end
  return job.failures + 1 < setting('max_attempts', LIMITS.DEFAULT_MAX_ATTEMPTS)
end

local function retry(job, lease, how)
  call('HSET', job.hash, 'failures', job.failures + 1, 'error', how.error or '', 'error_code', how.error_code or '')
  return_job(job, lease, 'retry', how.retry_in > 0 and NOW + how.retry_in or nil)
end

local function end_choice(job, lease, choice, how)
  if is_retried(job, lease, how) then
    retry(job, lease, how)
    return forget_lease(job.id)
  end
  if how.entry then write_end(job, lease, choice, how.state, how.entry) end
  if how.retry_in or all_ended(lease) then
    end_job(job, lease, how)
    return forget_lease(job.id)
  end
  changed[job.id] = lease
end

-- ---------------------------------------------------------------- one choice

-- What a key of the wrong type means: the job cannot go on anywhere, so it ends in the dead set with that reason. When
-- its hash is what is wrong, there is nothing left that could end: the lease goes.
local function broken(id, job, lease, reason)
  -- It cannot be ended while the queue's own keys are foreign too: it stays with its owner, who hears the reason.
  if wrong_key(incarnation) then return 'broken ' .. reason end
  forget_lease(id)
  if not job then
    forget_lease_of_nothing(id, lease, reason)
    return 'broken ' .. reason
  end
  end_job(job, lease, { state = 'failed', error = reason, error_code = 'broken_key', incarnation = incarnation })
  return 'broken ' .. reason
end

local function without_lease(id, epoch)
  local _, suffix = names_of(id)
  if not suffix then return 'replaced' end
  local ended_by = try('HGET', PREFIX .. 'job:' .. suffix, 'ended_by')
  return ended_by == incarnation .. ':' .. epoch and 'already' or 'replaced'
end

-- What was measured first stands; the exact number of prompt tokens replaces the estimate.
local function note_extras(job, extras)
  job.scheduled = job.scheduled or extras[1] or nil
  job.first_token = job.first_token or extras[2] or nil
  job.prompt = extras[3] or job.prompt
  job.fingerprint = job.fingerprint or extras[4] or nil
  call('HSET', job.hash, 'scheduled', job.scheduled or '', 'first_token', job.first_token or '', 'prompt', job.prompt,
    'fingerprint', job.fingerprint or '')
end

-- A result that was written in parts must be there whole before the end may name it.
local function has_all_parts(job, end_row)
  local num_bytes = end_row[10]
  return not num_bytes or try('STRLEN', result_key(job)) == num_bytes
end

-- Progress forgives: a job that got further has not killed the process at the same place again.
local function forgive(id, lease)
  local job = load_job(id)
  if job then call('HDEL', job.hash, 'deaths') end
  lease[DEATHS] = 0
end

local function append(id, lease, choice, to, entry)
  local _, suffix = names_of(id)
  return try('XADD', PREFIX .. 'channel:' .. suffix .. ':' .. choice, string.format('%d-0', to), 'e', entry)
end

local function stop_word(word, lease)
  return lease[FLAG] ~= '' and word .. ' ' .. lease[FLAG] or word
end

-- Where the choice stands against what was sent: nil when it is next in line.
local function out_of_line(lease, at, from, tokens, has_end)
  local offset = lease[at]
  if lease[at + 1] ~= 0 then return stop_word('already', lease) end
  if from == offset then return nil end
  if from + tokens <= offset and not has_end then return stop_word('already', lease) end
  return 'at ' .. offset
end

local function advance(row)
  local id, epoch, choice, from, tokens = row[1], row[2], row[3], row[4], row[5]
  local lease = leases[id]
  if not lease then return without_lease(id, epoch) end
  local at = FIRST + 2 * choice
  if lease[OWNER] ~= incarnation or lease[EPOCH] ~= epoch or not lease[at] then return 'replaced' end
  local elsewhere = out_of_line(lease, at, from, tokens, row[8])
  if elsewhere then return elsewhere end

  local job, why
  if row[7] or row[8] then
    job, why = load_job(id)
    if not job then return broken(id, nil, lease, 'job hash: ' .. why) end
  end
  if row[8] and not has_all_parts(job, row[8]) then return 'at ' .. lease[at] end
  if tokens > 0 then
    local added = append(id, lease, choice, from + tokens, row[6])
    if failed(added) then return broken(id, load_job(id), lease, 'channel ' .. choice .. ': ' .. added.err) end
    lease[at] = from + tokens
    changed[id] = lease
    if lease[DEATHS] == 1 then forgive(id, lease) end
  end
  if row[7] then note_extras(job, row[7]) end
  local word = stop_word('ok', lease)
  if row[8] then end_choice(job, lease, choice, how_of(row[8])) end
  return word
end

local answers = {}
if #rows > 0 then read_leases() end
for i = 1, #rows do answers[i] = advance(rows[i]) end
write_leases()
finish()
return answers
