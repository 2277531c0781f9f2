-- Remove every key of ended jobs.
--
-- KEYS: config.
-- ARGV[1]: packed array of job ids.
-- Reply: for each 1 (deleted), or 0 if it has not ended.
-- Reads: idem, job.
-- Writes: channel, dead, idem, job, payload, result.
-- Bound: LIMITS.SLICE_JOBS jobs, with LIMITS.MAX_CHOICES channels of each.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local function forget_key(job)
  if not job.key then return end
  local value = try('GET', idem_key(job))
  local is_mine = type(value) == 'string' and string.sub(value, 1, #job.id + 1) == job.id .. ' '
  if is_mine then call('DEL', idem_key(job)) end
end

local function delete(id)
  local job, why = load_job(id)
  if not job then return why == 'unknown' and 1 or 0 end
  if job.state == 'queued' or job.state == 'running' then return 0 end
  forget_key(job)
  local keys = { row_key(job), payload_key(job), result_key(job) }
  for choice = 0, job.choices - 1 do keys[#keys + 1] = channel_key(job, choice) end
  call('DEL', unpack(keys))
  call('ZREM', DEAD, id)
  return 1
end

local answers = {}
for i, id in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do answers[i] = delete(id) end
finish()
return answers
