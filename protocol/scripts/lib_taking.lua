-- The room that a pull has left, and leasing one job.

local payload_bytes, is_over = 0, false
local new_leases = {}
local ends
local function ends_library()
  ends = ends or load_ends()
  return ends
end

local function num_taken() return #taken / 4 end

-- ---------------------------------------------------------------- room

local function has_room() return request.kv > 0 and request.prefill > 0 and request.sequences > 0 end

local function fits(need)
  return need.cost <= request.kv and need.prompt <= request.prefill and need.choices <= request.sequences
end

local need_of
do

-- A cost above the limit of this queue is an overestimate: use the limit.
local MAX_JOB_TOKENS = setting('max_job_tokens', math.huge)
-- Published tokens count as prompt, since they are computed again.
function need_of(job)
  local prompt = job.prompt
  if job.published then prompt = prompt + published_tokens(leases.of_row(job)) end
  local bound = math.min(job.cost, prompt + job.choices * request.reserve, MAX_JOB_TOKENS)
  return { prompt = math.min(prompt, bound), cost = bound, choices = job.choices }
end

end

-- The slice is full: other jobs wait for the next pull, which follows at once.
local function is_slice_full()
  if num_taken() >= LIMITS.PULL_JOBS or payload_bytes >= LIMITS.MAX_CALL_BYTES or slice.is_spent() then
    has_more = true
  end
  return has_more or is_over
end

-- ---------------------------------------------------------------- leasing one job

-- A leased job in the reply: its id, row, prompt and lease.
local function add_leased(job, lease, payload)
  local at = #taken
  job.packed = rows.of(job)
  taken[at + 1], taken[at + 2], taken[at + 3], taken[at + 4] = job.id, job.packed, payload, pack_lease(lease)
end

local function read_payload(job)
  local payload = try('GETRANGE', payload_key(job), '0', 'LIMITS.MAX_PROMPT_BYTES')
  if failed(payload) or #payload > LIMITS.MAX_PROMPT_BYTES or payload == '' then return nil end
  return payload
end

local is_too_late  -- the name used outside

do

local batch_deadlines = {}
local function deadline_of_batch(batch)
  if not batch_deadlines[batch] then
    local found = try('HGET', batch_key(batch), 'deadline')
    batch_deadlines[batch] = type(found) == 'string' and tonumber(found) or math.huge
  end
  return batch_deadlines[batch]
end

-- The job's time has passed, but its timer has not fired yet: end the job instead of starting it. The next pull follows
-- at once.
function is_too_late(job, lease)
  local reason
  if job.ttl and job.attempt == 0 and job.ttl <= NOW then
    reason = 'unstarted'
  elseif job.deadline and job.deadline <= NOW then
    reason = 'expired'
  elseif job.batch and deadline_of_batch(job.batch) <= NOW then
    reason = 'batch_expired'
  end
  if not reason then return false end
  local library = ends_library()
  library.end_without_worker(job, lease, 'expired', library.reasons[reason])
  has_more = true
  return true
end

end

-- How long a job must wait for a worker of another model or engine, in ms; nil if this worker may have it.
local wait_for_worker, aside_ms
do

-- Whether a fingerprint is that of this worker's model, or of the model with one of its adapters.
local function is_own(fingerprint)
  return string.find(' ' .. request.own_model .. ' ', ' ' .. fingerprint .. ' ', 1, true) ~= nil
end

-- Whether another model began the job, and this worker continues only jobs of its own.
local function is_of_other_model(job, lease)
  local began_with = request.own_model and job.fingerprint
  return began_with and not is_own(began_with) and published_tokens(lease) > 0
end

-- A model whose key is foreign counts as served: the next heartbeat of a worker with it replaces that key.
local is_known = {}
local function is_served(model)
  if is_known[model] == nil then
    local num_workers = try('ZCOUNT', SERVING .. model, '(' .. beat_time(), '+inf')
    is_known[model] = failed(num_workers) or num_workers > 0
  end
  return is_known[model]
end

-- If no live worker serves the model, this one takes the job, and ends it with the reason.
local function is_for_other_model(job)
  local model = offers.model_of(job)
  local mine = model and call('HMGET', MINE, 'model', 'adapters') or {}
  if not mine[1] or mine[1] == model then return false end
  local is_adapter = string.find(' ' .. (mine[2] or '') .. ' ', ' ' .. model .. ' ', 1, true)
  return not is_adapter and is_served(model)
end

-- If no live worker has an engine that has not declined the job, this one takes it, and ends it with the reason.
local function is_for_other_engine(job)
  return job.declined and offers.is_declined_by(job, ME) and offers.has_other(job)
end

-- The more jobs are set aside, the longer each is, so that the cost of examining them again is constant.
function aside_ms()
  return math.min(math.max(LIMITS.ASIDE_MS, LIMITS.ASIDE_EACH_MS * call('ZCARD', DELAYED)), LIMITS.ASIDE_MOST_MS)
end

function wait_for_worker(job, lease)
  if is_of_other_model(job, lease) then return request.model_wait_ms end
  if is_for_other_model(job) or is_for_other_engine(job) then return aside_ms() end
end

end

-- Without its prompt, a job can never run: it ends in the dead set.
local function give_up_payload(job, lease)
  ends_library().end_job(job, lease, {
    state = 'failed', error = 'The prompt is gone from the queue.', error_code = 'payload_lost',
  })
end

-- queued -> running, for this incarnation, with the next epoch. `mark`: 'h' held until there is room, or ' '.
local function start(job, lease, payload, need, mark)
  enter(job, 'running')
  job.attempt = job.attempt + 1
  job.epoch = job.epoch + 1
  lease.owner, lease.epoch, lease.number, lease.place, lease.mark = ME, job.epoch, request.number, num_taken(), mark
  lease.deaths = job.deaths and 1 or 0
  job.owner, job.started, job.entry, job.lane = ME, NOW, false, false
  rows.set_rare(job.rare, 'gap', nil)
  rows.set_rare(job.rare, 'published', nil)
  save(job)
  if job.attempt == 1 and job.ttl then call('ZREM', TIMERS, 'ttl|' .. job.id) end
  count_running(job.id, 1)
  emit('started', job, { epoch = job.epoch, attempt = job.attempt, incarnation = ME })
  add_leased(job, lease, payload)
  new_leases[#new_leases + 1], new_leases[#new_leases + 2] = job.id, taken[#taken]
  payload_bytes = payload_bytes + #payload
  request.kv, request.prefill = request.kv - need.cost, request.prefill - need.prompt
  request.sequences = request.sequences - need.choices
end
