-- Read entries of a lane for the audit, each with the job that it names, at one instant.
--
-- KEYS: config.
-- ARGV: lane (`<class>:<tenant>`), id after which to begin, or '-', how many.
-- Reply: {last id or false, tokens by the entries, number, tokens and bytes of their jobs, {{entry, job, state, its
--   entry} …} without a matching job}; unknown values are false.
-- Reads: job, lane.
-- Writes: nothing.
-- Bound: LIMITS.MAX_JOBS_PER_CALL entries.

local is_sound = is_text(ARGV[1], LIMITS.MAX_LANE_BYTES) and whole(ARGV[3], LIMITS.MAX_JOBS_PER_CALL)
  and string.find(ARGV[2], '^[(]?[%d-]+$')
if not is_sound then return wrong_arguments() end
local key, name = PREFIX .. 'lane:' .. ARGV[1], ARGV[1]
local tokens, jobs, job_tokens, job_bytes, without_job = 0, 0, 0, 0, {}

local function look_at(entry)
  local parsed = parse_entry(entry)
  local job = parsed and load_job(parsed.job) or {}
  tokens = tokens + (job.cost or 0)
  if job.state == 'queued' and job.entry == entry[1] and job.lane == name then
    jobs, job_tokens, job_bytes = jobs + 1, job_tokens + job.cost, job_bytes + job.bytes
  else
    without_job[#without_job + 1] = { entry[1], parsed and parsed.job or false, job.state or false, job.entry or false }
  end
end

-- A key of another type has no entries. The audit of its jobs finds that theirs are missing.
local entries = try('XRANGE', key, ARGV[2], '+', 'COUNT', ARGV[3])
if failed(entries) then entries = {} end
for _, entry in ipairs(entries) do look_at(entry) end
return { #entries > 0 and entries[#entries][1] or false, tokens, jobs, job_tokens, job_bytes, without_job }
