-- include: lib_counts
-- Read jobs for the audit: the row of each and every record that refers to it, at one instant.
--
-- KEYS: config.
-- ARGV[1]: packed array of {job id, incarnations whose lists of leases were seen to have it}.
-- Reply: for each an array in the order of `picture_of`.
-- Reads: alive, channel, dead, delayed, held, job, lane, members, payload, suspects, timers.
-- Writes: nothing.
-- Bound: LIMITS.SLICE_JOBS jobs, with LIMITS.MAX_CHOICES channels and the named incarnations of each.

local function number_in(zset, id) return tonumber(call('ZSCORE', zset, id) or '') or false end

-- Those of the incarnations that hold the job and are not its owner.
local function strays_of(id, owner, holders)
  local strays = {}
  for _, holder in ipairs(holders) do
    if holder ~= owner and try('HEXISTS', held_key(holder), id) == 1 then strays[#strays + 1] = holder end
  end
  return strays
end

-- 1 if its batch lists it as open, 0 if not, false without a batch.
local function place_in_batch(job)
  if not job.batch then return false end
  local score = try('ZSCORE', members_key(job.batch), job.id)
  return not failed(score) and score and 1 or 0
end

-- Whether a channel of an ended job has tokens, but no end: its readers wait.
local function has_open_channel(job)
  if not job.ended then return false end
  for choice = 0, job.choices - 1 do
    local last = try('XREVRANGE', channel_key(job, choice), '+', '-', 'COUNT', 1)
    if not failed(last) and last[1] and string.find(last[1][1], '-0$') then return true end
  end
  return false
end

local function picture_of(id, holders)
  local job, why = load_job(id)
  local lease = job and job.state == 'running' and leases.held(job)
  job = job or {}
  local owner = job.state == 'running' and job.owner or nil
  return {
    why or false, job.state or false, job.version or 0, job.cost or 0, job.bytes or 0, job.epoch or 0,
    job.entry or false, job.lane or false, job.id and entry_of(job) and 1 or 0,
    call('ZSCORE', DELAYED, id) and 1 or 0, call('ZSCORE', SUSPECTS, id) and 1 or 0,
    job.id and has_timer(job) and 1 or 0,
    owner or false, lease and lease.epoch or 0, lease and 1 or 0,
    owner and owner ~= '' and call('ZSCORE', ALIVE, owner) and 1 or 0,
    job.id and call('EXISTS', payload_key(job)) or 0, number_in(DEAD, id), job.ended or false, job.submitted or false,
    place_in_batch(job), has_open_channel(job) and 1 or 0, strays_of(id, owner, holders),
  }
end

local pictures = {}
for i, row in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string', 'table')) do
  pictures[i] = picture_of(row[1], row[2])
end
return { NOW, pictures }
