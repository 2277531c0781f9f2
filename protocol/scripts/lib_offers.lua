-- Which engines the living workers have, by the texts of their offers, and which of them have declined a job.

local offers = {}

do

-- The model that a job names; nil if it names none, or its spec cannot be read. The spec is `{version, {name: value}}`.
function offers.model_of(job)
  if not string.find(job.spec, '\165model', 1, true) then return nil end
  local is_read, spec = pcall(cmsgpack.unpack, job.spec)
  local values = is_read and type(spec) == 'table' and spec[2]
  return type(values) == 'table' and type(values.model) == 'string' and values.model or nil
end

local function mark_of(offer) return string.sub(redis.sha1hex(offer), 1, 16) end

local function has_declined(job, offer)
  return job.declined ~= nil and string.find(job.declined, mark_of(offer), 1, true) ~= nil
end

-- Whether the engine of a worker has declined the job.
function offers.is_declined_by(job, incarnation)
  return has_declined(job, call('HGET', worker_key(incarnation), 'offer') or '')
end

-- Whether a living worker of a model has the adapter of this name.
local function is_adapter(name, model)
  local expiry = try('ZSCORE', PARENTS, name .. '\n' .. model)
  return type(expiry) == 'string' and tonumber(expiry) > beat_time()
end

-- Whether a living worker that may run the job has an engine that has not declined it. One that has deregistered counts
-- until its last heartbeat would have expired.
function offers.has_other(job)
  local model = offers.model_of(job)
  local listed = try('ZRANGEBYSCORE', OFFERS, '(' .. beat_time(), '+inf', 'LIMIT', 0, LIMITS.MAX_OFFERS)
  for _, member in ipairs(failed(listed) and {} or listed) do
    local offer, its_model = string.match(member, '^([^\n]*)\n(.*)$')
    local is_its = not model or model == its_model or is_adapter(model, its_model)
    if offer and is_its and not has_declined(job, offer) then return true end
  end
  return false
end

-- Note that the engine of a worker declines the job. The marks of the last engines are kept.
function offers.decline(job, incarnation)
  local mark = mark_of(call('HGET', worker_key(incarnation), 'offer') or '')
  if not string.find(job.declined or '', mark, 1, true) then
    job.declined = string.sub((job.declined or '') .. mark, -16 * LIMITS.MAX_OFFERS)
  end
end

end
