-- The places of a queued job: on a lane, delayed, or among the suspects.

-- Tokens that a job needs when it is admitted: those to be computed again, and those it may still generate, up to the
-- reserve.
local RESERVE = setting('reserve_tokens', LIMITS.DEFAULT_RESERVE_TOKENS)
local function cost_of(job, published)
  local rest = math.max(0, job.max_tokens - math.floor(published / job.choices))
  return math.min(LIMITS.MAX_ROW_NUMBER, job.prompt + published + job.choices * math.min(rest, RESERVE))
end

-- The waiting jobs of a tenant, in any place. Read once, written once by `finish`; a tenant without any is kept for a
-- while, so that other tenants leave room for it.
local TENANTS = PREFIX .. 'tenants'
local waiting_of, read_waiting, write_waiting  -- the names used outside: a script may have 200 locals
local more_jobs, more_tokens, more_bytes = 0, 0, 0  -- that wait since this call, or fewer

do

local held_by = {}

local function note_waiting(tenant, found)
  found = type(found) == 'string' and found or nil
  local jobs, tokens, bytes = string.match(found or '', '^(%d+) (%d+) (%d+) ')
  local held = {
    jobs = tonumber(jobs or 0), tokens = tonumber(tokens or 0), bytes = tonumber(bytes or 0), is_known = found,
  }
  -- Another user may have written any number.
  if held.jobs + held.tokens + held.bytes > LIMITS.MAX_NUMBER then held.jobs, held.tokens, held.bytes = 0, 0, 0 end
  held_by[tenant] = held
  return held
end

function read_waiting(tenants)
  local found = try('HMGET', TENANTS, unpack(tenants))
  for i, tenant in ipairs(tenants) do
    if not held_by[tenant] then note_waiting(tenant, not failed(found) and found[i]) end
  end
end

function waiting_of(tenant)
  if not held_by[tenant] then read_waiting({ tenant }) end
  return held_by[tenant]
end

function write_waiting()
  count('waiting_jobs', more_jobs)
  count('waiting_tokens', more_tokens)
  count('waiting_bytes', more_bytes)
  local flat = {}
  for tenant, held in pairs(held_by) do
    if held.is_changed then
      flat[#flat + 1], flat[#flat + 2] = tenant, string.format('%d %d %d %d', math.max(0, held.jobs),
        math.max(0, held.tokens), math.max(0, held.bytes), NOW)
    end
  end
  for from = 1, #flat, 1000 do try('HSET', TENANTS, unpack(flat, from, math.min(from + 999, #flat))) end
  if #flat > 2 * MANY and is_type(TENANTS, 'hash') then hash_for_many(TENANTS) end
end

end

local function count_waiting(job, by)
  local held = waiting_of(job.tenant)
  local tokens, bytes = by * job.cost, by * job.bytes
  held.jobs, held.tokens, held.bytes, held.is_changed = held.jobs + by, held.tokens + tokens, held.bytes + bytes, true
  more_jobs, more_tokens, more_bytes = more_jobs + by, more_tokens + tokens, more_bytes + bytes
end

if SETTINGS.limited then
INCLUDE lib_limits
end

-- Remove a job from its place: lane, delayed jobs or suspects.
local function leave_waiting(job, is_taken)
  count_waiting(job, -1)
  if job.entry then return remove_entry(job, is_taken) end
  call('ZREM', SUSPECTS, job.id)
  call('ZREM', DELAYED, job.id)
end

local function add_timer(kind, job, at)
  call('ZADD', TIMERS, at, kind .. '|' .. job.id)
end

local function remove_timers(job)
  if not (job.not_before or job.ttl or job.deadline or job.retry) then return end
  local id = job.id
  call('ZREM', TIMERS, 'not_before|' .. id, 'ttl|' .. id, 'deadline|' .. id, 'retry|' .. id)
end

-- Release a lease without ending the job: remove it from the owner, keep the offsets.
local function release_lease(job, lease)
  try('HDEL', held_key(job.owner), job.id)
  job.previous, job.owner = job.owner, ''
  job.published = offsets_of(lease)
  lease.owner, lease.flag = '', ''
end

local function wait_until(job, at)
  job.retry, job.waits_since = at, NOW
  save(job)
  call('ZADD', DELAYED, 0, job.id)
  add_timer('retry', job, at)
end

-- Put a job on a lane. If another program's key is in its place, or an entry at the last possible id, the job is
-- delayed until that is removed.
local function enqueue(job, class, at, lease)
  local lane = open_lane(class, job.tenant)
  if not (lane.is_sound and add_entry(job, class, at)) then
    to_garbage(lane.key, 'a foreign key or a last id where a lane should be; jobs wait for it to go')
    wait_until(job, NOW + LIMITS.FOREIGN_LANE_WAIT_S * 1000)
  end
  save(job)
end

-- Enqueue by its submit time, in the class that is served first.
local function enqueue_again(job, lease) enqueue(job, RETURNED, job.submitted, lease) end

-- Running -> queued: with a new entry by its submit time in the class that is served first, among the suspects, or
-- delayed (`retry_at`).
local function return_job(job, lease, why, retry_at)
  enter(job, 'queued')
  release_lease(job, lease)
  count_running(job.id, -1)
  job.cost = cost_of(job, published_tokens(lease))
  count_waiting(job, 1)
  local is_retry = why == 'retry'
  emit('returned', job, {
    why = why, epoch = lease.epoch, gap_ms = job.gap, seen_ms = job.seen, error = is_retry and job.error or nil,
    error_code = is_retry and job.error_code or nil,
  })
  if why == 'suspect' then
    call('ZADD', SUSPECTS, NOW, job.id)
    notify()
  elseif retry_at then
    wait_until(job, retry_at)
  else
    return enqueue_again(job, lease)
  end
  save(job)
end
