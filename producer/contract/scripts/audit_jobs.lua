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
  }
end

local pictures = {}
for i, id in ipairs(rows_of(ARGV[1], 'string')) do pictures[i] = picture_of(id) end
return { NOW, pictures }
