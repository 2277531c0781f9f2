-- Restore missing prompts of jobs that have not ended.
--
-- KEYS: config.
-- ARGV[1]: packed array of {job id, prompt as it was submitted}.
-- Reply: for each 1, or 0 if the prompt exists, the job has ended, or its prompt was another.
-- Reads: job.
-- Writes: payload.
-- Bound: LIMITS.SLICE_JOBS prompts.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local function restore(id, payload)
  local job = load_job(id)
  if not job or job.state ~= 'queued' and job.state ~= 'running' then return 0 end
  if #payload + #(job.spec or '') ~= job.bytes then return 0 end
  return call('SETNX', payload_key(job), payload)
end

local answers = {}
for i, row in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string', 'string')) do
  answers[i] = restore(row[1], row[2])
end
return answers
