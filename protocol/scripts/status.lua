-- Read the state of jobs.
--
-- KEYS: config.
-- ARGV[1]: packed array of job ids.
-- Reply: for each false (unknown), or an array in the order below.
-- Reads: buckets, depth, held, job, leased, limits, parked, result.
-- Writes: nothing.
-- Bound: LIMITS.SLICE_JOBS jobs.

local function offsets(job, lease)
  local published = {}
  -- A job that was never started has none.
  if job.attempt == 0 and not job.published then return published end
  for at = 1, lease and #lease or 0, 2 do published[#published + 1] = lease[at] end
  return published
end

-- An upper bound: cancelled jobs ahead of it are still counted.
local function ahead_of(job)
  if not job.entry then return 0, 0 end
  local class, tenant = string.match(job.lane, '^([^:]+):(.+)$')
  local lane = open_lane(class, tenant)
  return math.max(0, job.number - 1 - lane.taken), math.max(0, job.before - lane.taken_tokens)
end

-- Time in ms until an unfinished job expires by its own deadline or time to live; 0 or less if it is overdue.
local function expires_in(job)
  if job.state ~= 'queued' and job.state ~= 'running' then return false end
  local at = job.deadline
  if job.ttl and job.attempt == 0 then at = math.min(at or job.ttl, job.ttl) end
  return at and at - NOW or false
end

local function look(id)
  local job = load_job(id)
  if not job then return false end
  local lease = leases.of(job)
  local jobs, tokens = false, false
  if job.state == 'queued' then jobs, tokens = ahead_of(job) end
  return {
    job.id, job.state, job.version, job.class, job.submitted, job.started or false, job.ended or false, job.attempt,
    job.owner ~= '' and job.owner or false, job.prompt, job.cost, job.choices, offsets(job, lease),
    job.error or false, job.error_code or false, job.reason or false, job.batch or false, job.spec or false, job.seed,
    jobs, tokens, call('EXISTS', result_key(job)), job.scheduled or false, job.first_token or false,
    lease and lease.flag ~= '' and lease.flag or false, job.requeues, job.output or false,
    job.failures, job.deaths or false, job.custom_id or false, job.line or false, expires_in(job),
    job.state == 'queued' and limits and limits.is_parked(job.tenant) and limits.facts_of(job.tenant) or false,
  }
end

local answers = {}
for i, id in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do answers[i] = look(id) end
return answers
