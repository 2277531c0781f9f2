-- include: lib_counts
-- Read jobs for the audit: the hash of each and every record that refers to it, at one instant. Never writes.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV[1]: packed array of job ids.
-- Reply: for each an array in the order of `picture_of`.

local function number_in(zset, id) return tonumber(call('ZSCORE', zset, id) or '') or false end

local function is_held(owner, id)
  if not owner or owner == '' then return 0 end
  local held = try('HEXISTS', held_key(owner), id)
  return failed(held) and 0 or held
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

local function picture_of(id)
  local job, why = load_job(id)
  local lease = read_lease(id)
  local owner = lease and lease[OWNER]
  job = job or {}
  return {
    why or false, job.state or false, job.version or 0, job.cost or 0, job.bytes or 0, job.epoch or 0,
    job.entry or false, job.lane or false, job.id and entry_of(job) and 1 or 0,
    call('ZSCORE', DELAYED, id) and 1 or 0, call('ZSCORE', SUSPECTS, id) and 1 or 0, job.id and has_timer(job) and 1 or 0,
    owner or false, lease and lease[EPOCH] or 0, is_held(owner, id),
    owner and owner ~= '' and call('ZSCORE', ALIVE, owner) and 1 or 0,
    job.id and call('EXISTS', payload_key(job)) or 0, number_in(DEAD, id), job.ended or false, job.submitted or false,
    place_in_batch(job), has_open_channel(job) and 1 or 0,
  }
end

local pictures = {}
for i, id in ipairs(rows_of(ARGV[1], LIMITS.MAX_JOBS_PER_CALL, 'string')) do pictures[i] = picture_of(id) end
return { NOW, pictures }
