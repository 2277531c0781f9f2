-- The limits of tenants: jobs that run at once, and tokens a minute. A call loads this only where the queue has limits.
--
-- A tenant at its limit is parked: `parked` has it, and none of its lanes is listed in a class. So pulls do not meet
-- it, and it hides no other tenant. `finish` parks tenants, and lists their lanes again: after the end that frees a
-- place, or when maintenance finds that enough tokens have flowed back.

local BUCKETS = PREFIX .. 'buckets'
local MS_PER_MINUTE = 60000
local known = {}  -- tenant -> its limits, and what this call knows and changes of it

limits = {}

-- A limit is of the whole queue: each partition has an equal part, the first ones the remainder, and at least 1.
local NUM_PARTITIONS = setting('partitions', 1)
local function part_of(limit)
  local part = math.floor(limit / NUM_PARTITIONS)
  if tonumber(PARTITION) < limit % NUM_PARTITIONS then part = part + 1 end
  return math.max(1, part)
end

local function limit_in(text, least)
  local limit = whole(text, LIMITS.MAX_TENANT_LIMIT)
  if not limit or limit < least then return nil end
  return limit > 0 and part_of(limit) or 0
end

-- Read the limits of tenants in one command. A value that another program wrote is no limit. `joined` and `left`: jobs
-- that run from now on, or no more; `is_seen`: whether `finish` looks if the tenant may start a job; `is_met`: a pull
-- met it.
function limits.read(tenants)
  local unknown, fields = {}, {}
  for _, tenant in ipairs(tenants) do
    if not known[tenant] then
      unknown[#unknown + 1] = tenant
      fields[#fields + 1], fields[#fields + 2] = 'max_running:' .. tenant, 'tokens_per_minute:' .. tenant
    end
  end
  if #unknown == 0 then return end
  local found = try('HMGET', TENANT_LIMITS, unpack(fields))
  if failed(found) then found = {} end
  for i, tenant in ipairs(unknown) do
    known[tenant] = {
      tenant = tenant, most = limit_in(found[2 * i - 1], 0), per_minute = limit_in(found[2 * i], 1), joined = {},
      left = {}, is_changed = false, is_seen = false,
    }
  end
end

local function limit_of(tenant)
  if not known[tenant] then limits.read({ tenant }) end
  return known[tenant]
end

-- ---------------------------------------------------------------- jobs that run

local function leased_key(tenant) return PREFIX .. 'leased:' .. tenant end

local function running_of(limit)
  if not limit.leased then
    local found = try('SCARD', leased_key(limit.tenant))
    limit.leased = failed(found) and 0 or found
  end
  return limit.leased + #limit.joined - #limit.left
end

-- Note that a job has a lease from now on (1), or none (-1).
function limits.count(id, by)
  local tenant = names_of(id)
  local limit = tenant and limit_of(tenant)
  if not limit or not limit.most then return end
  local ids = by > 0 and limit.joined or limit.left
  ids[#ids + 1] = id
  limit.is_seen = true
end

local function write_leased(limit)
  if #limit.joined + #limit.left == 0 then return end
  local key = leased_key(limit.tenant)
  if not is_type(key, 'set') then call('DEL', key) end
  call_in_parts('SADD', key, limit.joined)
  call_in_parts('SREM', key, limit.left)
  limit.joined, limit.left, limit.leased = {}, {}, nil
end

-- ---------------------------------------------------------------- tokens a minute

-- Tokens in the bucket of a tenant: a minute's at most, below 0 after a job that took more than there were. A bucket
-- that nobody has used is full.
local function tokens_of(limit)
  if limit.tokens then return limit.tokens end
  local found = try('HGET', BUCKETS, limit.tenant)
  local text, since = string.match(type(found) == 'string' and found or '', '^(%S+) (%d+)$')
  local tokens, at = tonumber(text or ''), whole(since, LIMITS.MAX_NUMBER)
  local is_sound = tokens and at and tokens >= -LIMITS.MAX_NUMBER and tokens <= LIMITS.MAX_NUMBER
  if not is_sound then tokens, at = limit.per_minute, NOW end
  -- The clock may have stepped back: what flows back counts from now on.
  if at > NOW then limit.is_changed = true end
  limit.tokens = math.min(limit.per_minute, tokens + math.max(0, NOW - at) * limit.per_minute / MS_PER_MINUTE)
  return limit.tokens
end

-- Take tokens from the bucket, or return some with a negative number.
function limits.charge(tenant, tokens)
  local limit = limit_of(tenant)
  if not limit.per_minute then return end
  limit.tokens = math.min(limit.per_minute, tokens_of(limit) - tokens)
  limit.is_changed, limit.is_seen = true, true
end

local function write_buckets()
  local flat = {}
  for tenant, limit in pairs(known) do
    if limit.is_changed then
      flat[#flat + 1], flat[#flat + 2] = tenant, string.format('%.6f %d', limit.tokens, NOW)
    end
  end
  if #flat == 0 then return end
  if not is_type(BUCKETS, 'hash') then call('DEL', BUCKETS) end
  call_in_parts('HSET', BUCKETS, flat)
end

-- ---------------------------------------------------------------- parking

-- When the tenant may start a job: nil if now, infinity if one of its jobs must end first.
local function free_at(limit)
  if limit.most and running_of(limit) >= limit.most then return math.huge end
  if limit.per_minute and tokens_of(limit) <= 0 then
    return NOW + math.ceil((1 - limit.tokens) * MS_PER_MINUTE / limit.per_minute)
  end
end

-- Whether the tenant may start a job now; if not, `finish` parks it.
function limits.may_start(tenant)
  local limit = limit_of(tenant)
  if not free_at(limit) then return true end
  limit.is_seen, limit.is_met = true, true
  return false
end

local parked = {}
local function parked_until(tenant)
  if parked[tenant] == nil then
    local found = try('ZSCORE', PARKED, tenant)
    parked[tenant] = not failed(found) and tonumber(found or '') or false
  end
  return parked[tenant]
end

-- A tenant without limits that is still parked was so when its limits were lost; a heartbeat finds it.
function limits.is_parked(tenant)
  local limit = known[tenant]
  if limit and not limit.most and not limit.per_minute then return false end
  return parked_until(tenant) ~= false
end

-- The lanes of a tenant, whether they are listed or not.
function limits.lanes_of(tenant)
  local keys, found = {}, {}
  for class in pairs(CLASSES) do keys[#keys + 1] = lane_key(class, tenant) end
  if call('EXISTS', unpack(keys)) == 0 then return found end
  for class in pairs(CLASSES) do
    if call('EXISTS', lane_key(class, tenant)) == 1 then found[#found + 1] = open_lane(class, tenant) end
  end
  return found
end

-- `finish` lists the lanes of the tenant by their heads.
local function list_again(tenant)
  parked[tenant] = false
  call('ZREM', PARKED, tenant)
  for _, lane in ipairs(limits.lanes_of(tenant)) do lane.has_lost = true end
  notify()
end

local function park(tenant, at)
  if not is_type(PARKED, 'zset') then call('DEL', PARKED) end
  parked[tenant] = at
  call('ZADD', PARKED, at == math.huge and '+inf' or at, tenant)
end

-- A heartbeat may do so for the tenants of all jobs of its worker: Lua passes at most about 8,000 values at once.
local function unlist(tenants)
  for from = 1, #tenants, 1000 do
    local to = math.min(from + 999, #tenants)
    for class in pairs(CLASSES) do
      try('ZREM', heads_key(class), unpack(tenants, from, to))
      try('ZREM', ready_key(class), unpack(tenants, from, to))
    end
  end
end

-- Park the tenants that this call has brought to their limits, and list those again that may start a job now.
local function write_parked()
  local stopped = {}
  for tenant, limit in pairs(known) do
    local at, was_parked = limit.is_seen and free_at(limit), limit.is_seen and parked_until(tenant)
    if at and (limit.is_met or not was_parked) then stopped[#stopped + 1] = tenant end
    if at and at ~= was_parked then park(tenant, at) end
    if was_parked and not at then list_again(tenant) end
  end
  unlist(stopped)
end

-- Before `finish` writes the lanes: their lists depend on it.
function limits.write()
  for _, limit in pairs(known) do write_leased(limit) end
  write_parked()
  write_buckets()
end

-- What is left of the limits of a tenant, as `list_limits` replies.
function limits.facts_of(tenant)
  local limit = limit_of(tenant)
  local at = free_at(limit)
  return {
    tenant, limit.most or false, limit.per_minute or false, limit.most and running_of(limit) or false,
    limit.per_minute and math.floor(tokens_of(limit)) or false, at == math.huge and -1 or at and at - NOW or false,
  }
end

-- ---------------------------------------------------------------- maintenance

local function look_at(tenants)
  limits.read(tenants)
  for _, tenant in ipairs(tenants) do known[tenant].is_seen = true end
end

-- Look at tenants whose tokens should suffice now: one slice. Returns whether more may be due.
function limits.look_at_due()
  local due = try('ZRANGEBYSCORE', PARKED, '-inf', NOW, 'LIMIT', 0, LIMITS.SLICE_JOBS)
  if failed(due) then return false end
  look_at(due)
  return #due == LIMITS.SLICE_JOBS
end

-- Parked tenants with waiting jobs, at most so many.
function limits.waiting_parked(most)
  local waiting, first = {}, 0
  repeat
    local page = try('ZRANGE', PARKED, first, first + LIMITS.LOOKS_PER_CALL - 1)
    if failed(page) or #page == 0 then return waiting end
    read_waiting(page)
    for _, tenant in ipairs(page) do
      if #waiting < most and waiting_of(tenant).jobs > 0 then waiting[#waiting + 1] = tenant end
    end
    first = first + #page
  until #waiting == most
  return waiting
end

local function forget_ended(tenant)
  local ids, limit = try('SRANDMEMBER', leased_key(tenant), LIMITS.SLICE_JOBS), limit_of(tenant)
  if failed(ids) then return end
  load_jobs(ids)
  for _, id in ipairs(ids) do
    local runs = names_of(id) == tenant and load_running(id)
    if not runs then limit.left[#limit.left + 1], limit.is_seen = id, true end
  end
end

-- Some of the parked tenants and of the jobs that count as running, other ones each time, and all leases of one worker:
-- after a failure of Redis, a set of running jobs may have too few or too many, and a tenant may be parked without a
-- limit.
function limits.check(incarnation)
  local some_parked = try('ZRANDMEMBER', PARKED, LIMITS.SLICE_JOBS)
  local some_limits = try('HRANDFIELD', TENANT_LIMITS, LIMITS.SLICE_JOBS)
  if not failed(some_parked) then look_at(some_parked) end
  for _, field in ipairs(failed(some_limits) and {} or some_limits) do
    local tenant = string.match(field, '^max_running:(.+)$')
    if tenant then forget_ended(tenant) end
  end
  for _, id in ipairs(call('HKEYS', held_key(incarnation))) do limits.count(id, 1) end
end

-- ---------------------------------------------------------------- changed limits

-- The leases of all tenants, read once in a call. The cost grows with the running jobs of the partition.
local leases_of_tenants
local function read_leases()
  leases_of_tenants = {}
  for _, incarnation in ipairs(call('ZRANGE', ALIVE, 0, -1)) do
    local ids = try('HKEYS', held_key(incarnation))
    for _, id in ipairs(failed(ids) and {} or ids) do
      local tenant = names_of(id) or ''
      leases_of_tenants[tenant] = leases_of_tenants[tenant] or {}
      table.insert(leases_of_tenants[tenant], id)
    end
  end
end

local function count_leases(limit)
  call('DEL', leased_key(limit.tenant))
  if not limit.most then return end
  if not leases_of_tenants then read_leases() end
  for _, id in ipairs(leases_of_tenants[limit.tenant] or {}) do limits.count(id, 1) end
end

-- Begin with new limits of a tenant: with a full bucket, and in mode fair without what it has saved up while it was
-- parked.
function limits.begin(tenant)
  known[tenant] = nil
  local limit = limit_of(tenant)
  try('HDEL', BUCKETS, tenant)
  count_leases(limit)
  limit.is_seen = true
  if MODE ~= 'fair' or not parked_until(tenant) then return end
  for _, lane in ipairs(limits.lanes_of(tenant)) do
    if lane.class ~= RETURNED then lift_served(lane.class, tenant) end
  end
end
