-- Read and delete what scripts of format 1 stored: jobs were hashes, leases one hash, and keys had no format in their
-- names (docs/decisions/a-format-has-its-own-keys.md). Workers of that format may serve its keys meanwhile, so its
-- lanes and counters stay correct. Any key may be of another type, so each is used with `try`.

local earlier = { PREFIX = string.match(PREFIX, '^({.*}:)') }

do

local LEASES, COUNTERS_1 = earlier.PREFIX .. 'leases', earlier.PREFIX .. 'counters'
local DEPTH_1, TENANTS_1 = earlier.PREFIX .. 'depth', earlier.PREFIX .. 'tenants'
local OWNER, EPOCH, FLAG, PREVIOUS, FIRST = 1, 2, 3, 4, 6  -- places in a lease
local MAX_FIELDS, MAX_SPEC_PARTS = 256, 64

local function key(...) return earlier.PREFIX .. table.concat({ ... }, ':') end
earlier.key = key

-- ---------------------------------------------------------------- a job

-- The greatest values of the numbers that each row has; those of `NEEDED` each hash had, too.
local MOST_FIXED = { class = LIMITS.MAX_PRIORITY, choices = LIMITS.MAX_CHOICES, max_tokens = LIMITS.MAX_TOKENS }
for name in string.gmatch('version attempt epoch failures requeues', '%S+') do MOST_FIXED[name] = LIMITS.MAX_VERSION end
for name in string.gmatch('prompt cost bytes submitted started charged scheduled first_token ended', '%S+') do
  MOST_FIXED[name] = LIMITS.MAX_ROW_NUMBER
end
local NEEDED = { 'version', 'class', 'choices', 'max_tokens', 'prompt', 'cost', 'submitted', 'state', 'seed', 'digest' }
local MOST_BYTES = {
  state = 9, seed = 20, digest = LIMITS.MAX_DIGEST_BYTES, spec = LIMITS.MAX_SPEC_BYTES,
  resolved = LIMITS.MAX_SPEC_BYTES, declined = 16 * LIMITS.MAX_OFFERS,
}
local RARE = {}
for name in string.gmatch([[
  batch key not_before ttl deadline callback custom_id line endpoint fingerprint resolved gap published deaths retry
  waits_since asked declined reason error error_code output ended_by
]], '%S+') do RARE[name] = true end

-- The fields of a hash as numbers and texts, without empty ones; nil and the name of one that no script of ours wrote.
local function checked(flat)
  local fields = {}
  for i = 1, #flat, 2 do
    local name, value = flat[i], flat[i + 1]
    if value ~= '' then
      local most = MOST_FIXED[name] or MOST[name]
      fields[name] = most and whole(value, most) or not most and value
      if not fields[name] or not most and #value > (MOST_BYTES[name] or #value) then return nil, name end
    end
  end
  for _, name in ipairs(NEEDED) do
    if not fields[name] then return nil, name end
  end
  local is_state = string.find(TRANSITIONS, '>' .. fields.state .. ' ', 1, true) and not string.find(fields.state, '%A')
  if not is_state then return nil, 'state' end
  if fields.choices == 0 then return nil, 'choices' end
  if string.find(fields.seed, '%D') then return nil, 'seed' end
  return fields
end

-- The spec of an ended job is in parts.
local function spec_of(fields)
  local parts = { fields.spec or '' }
  for i = 1, math.min(whole(fields.parts, MAX_SPEC_PARTS) or 0, MAX_SPEC_PARTS) do
    parts[#parts + 1] = fields['spec.' .. i] or ''
  end
  return table.concat(parts)
end

local function job_from(id, tenant, suffix, fields)
  local rare = {}
  for name in pairs(RARE) do rare[name] = fields[name] end
  return rows.with_rare({
    id = id, tenant = tenant, suffix = suffix, state = fields.state, class = fields.class, choices = fields.choices,
    version = fields.version, attempt = fields.attempt or 0, epoch = fields.epoch or 0, failures = fields.failures or 0,
    requeues = fields.requeues or 0, max_tokens = fields.max_tokens, prompt = fields.prompt, cost = fields.cost,
    bytes = fields.bytes or 0, submitted = fields.submitted, started = fields.started or false,
    charged = fields.charged or false, number = 0, before = 0, scheduled = fields.scheduled or false,
    first_token = fields.first_token or false, ended = fields.ended or false, entry = false, lane = false, owner = '',
    digest = fields.digest, seed = fields.seed, spec = spec_of(fields), keep_ms = false, packed = false,
  }, rare)
end

local has_gone, leaving = {}, {}  -- jobs that this call has moved

-- The reply to a command; nil if another program's key is in the place of ours. Any other error stops the call, before
-- it deletes what was not moved.
function earlier.unless_foreign(...)
  local reply = try(...)
  if not failed(reply) then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply.err) end
end
local unless_foreign = earlier.unless_foreign

-- The job as a table of the present format, without a place, and its entry and lane; or nil and why: 'unknown', also of
-- one that has been moved, or what is foreign about it.
function earlier.load(id)
  local tenant, suffix = names_of(id)
  if not tenant then return nil, 'not a job id' end
  if has_gone[id] then return nil, 'unknown' end
  local size = unless_foreign('HLEN', key('job', suffix))
  if not size then return nil, 'wrong type' end
  if size > MAX_FIELDS then return nil, 'not a job: too many fields' end
  local flat = call('HGETALL', key('job', suffix))
  -- What `leave_trace` leaves has no version.
  if #flat <= 4 then return nil, 'unknown' end
  local fields, foreign = checked(flat)
  if not fields then return nil, 'not a job: ' .. foreign end
  local job = job_from(id, tenant, suffix, fields)
  if #job.spec > LIMITS.MAX_SPEC_BYTES then return nil, 'not a job: spec' end
  if #rows.of(job) > LIMITS.MAX_ROW_BYTES then return nil, 'not a job: row' end
  return job, { entry = fields.entry, lane = fields.lane }
end

-- ---------------------------------------------------------------- leases

-- Owner, epoch, flag, previous owner and published offsets of a job; nil if it was never pulled.
function earlier.lease(job)
  local packed = unless_foreign('HGET', LEASES, job.id)
  local is_read, lease = pcall(cmsgpack.unpack, type(packed) == 'string' and packed or '')
  if not is_read or type(lease) ~= 'table' or type(lease[OWNER]) ~= 'string' then return nil end
  local offsets = {}
  for choice = 0, job.choices - 1 do
    local offset, ended = whole(lease[FIRST + 2 * choice], LIMITS.MAX_TOKENS), whole(lease[FIRST + 2 * choice + 1], 2)
    offsets[#offsets + 1] = string.format('%d:%d', offset or 0, ended or 0)
  end
  return {
    owner = lease[OWNER], epoch = whole(lease[EPOCH], LIMITS.MAX_VERSION) or job.epoch,
    flag = END_REASONS[lease[FLAG]] and lease[FLAG] or '',
    previous = type(lease[PREVIOUS]) == 'string' and lease[PREVIOUS] or '',
    published = table.concat(offsets, ','),
  }
end

-- Whether a worker has ended, or must have: nobody else returns its jobs if no other worker of its format lives.
function earlier.is_gone(incarnation, seen)
  local found = unless_foreign('HMGET', key('worker', incarnation), 'life', 'beaten', 'reported', 'farewell')
  if not found or found[3] == '1' or found[4] == '1' then return true end
  local life = whole(found[1], LIMITS.MAX_NUMBER) or LIMITS.HEARTBEAT_LIFETIME_S * 1000
  local grace = life + LIMITS.BEAT_EVERY_S * 1000
  local beaten = math.max(seen or 0, whole(found[2], LIMITS.MAX_NUMBER) or 0)
  return math.min(beaten, NOW) + grace < NOW and has_been_up_for(grace)
end

-- ---------------------------------------------------------------- counters and lanes

local counted_1, lanes_1, tenants_1 = {}, {}, {}

function earlier.count(name, by) counted_1[name] = (counted_1[name] or 0) + by end

local function open(name)
  if lanes_1[name] then return lanes_1[name] end
  local class, tenant = string.match(name, '^([^:]+):(.+)$')
  if not tenant then return nil end
  lanes_1[name] = {
    name = name, class = class, tenant = tenant, key = key('lane', name), gone = {}, jobs = 0, tokens = 0,
  }
  return lanes_1[name]
end

-- The first entries of a lane: {id, job, at}, without `at` where another program wrote it.
function earlier.entries(name, most)
  local lane = open(name)
  local found = lane and try('XRANGE', lane.key, '-', '+', 'COUNT', most) or {}
  local entries = {}
  for i, entry in ipairs(failed(found) and {} or found) do
    local fields = entry[2]
    local is_ours = fields[1] == 'job' and fields[9] == 'at'
    entries[i] = { id = entry[1], job = fields[2], at = is_ours and whole(fields[10], LIMITS.MAX_NUMBER) or nil }
  end
  return entries
end

-- The time that an entry is ordered by; nil if the lane does not have it.
function earlier.time_of(name, entry)
  local found = name and entry and try('XRANGE', key('lane', name), entry, entry)
  return found and not failed(found) and found[1] and whole(found[1][2][10], LIMITS.MAX_NUMBER)
end

-- A lane of a class by its tenant with the oldest head; nil if none waits.
function earlier.first_lane(class)
  local found = try('ZRANGE', key('heads', class), 0, 0)
  return not failed(found) and found[1] and class .. ':' .. found[1] or nil
end

function earlier.discard(name, entry)
  local lane = open(name)
  if lane then lane.gone[#lane.gone + 1] = entry end
end

-- Remove a lane from its class. Its jobs are then found by their hashes.
function earlier.unlist(name)
  local class, tenant = string.match(name, '^([^:]+):(.+)$')
  try('ZREM', key('heads', class), tenant)
  try('ZREM', key('ready', class), tenant)
end

local function write_depth(lane)
  local found = try('HGET', DEPTH_1, lane.name)
  local numbers = {}
  for number in string.gmatch(type(found) == 'string' and found or '', '%d+') do
    numbers[#numbers + 1] = whole(number, LIMITS.MAX_NUMBER) or 0
  end
  if #numbers ~= 6 then return end
  numbers[1], numbers[2] = math.max(0, numbers[1] - lane.jobs), math.max(0, numbers[2] - lane.tokens)
  try('HSET', DEPTH_1, lane.name, string.format('%d %d %d %d %d %d', unpack(numbers)))
end

local function write_lane(lane)
  if #lane.gone > 0 and failed(try('XDEL', lane.key, unpack(lane.gone))) then return earlier.unlist(lane.name) end
  local head = earlier.entries(lane.name, 1)[1]
  if head then
    write_depth(lane)
    return try('ZADD', key('heads', lane.class), 'XX', head.at or NOW, lane.tenant)
  end
  earlier.unlist(lane.name)
  try('HDEL', DEPTH_1, lane.name)
  if not failed(try('XLEN', lane.key)) then call('DEL', lane.key) end
end

local function write_tenant(tenant, less)
  local found = try('HGET', TENANTS_1, tenant)
  local jobs, tokens, bytes, rest = string.match(type(found) == 'string' and found or '', '^(%d+) (%d+) (%d+) (.*)$')
  if not jobs then return end
  local function left(text, by) return math.max(0, (whole(text, LIMITS.MAX_NUMBER) or 0) - by) end
  try('HSET', TENANTS_1, tenant,
    string.format('%d %d %d %s', left(jobs, less.jobs), left(tokens, less.tokens), left(bytes, less.bytes), rest))
end

-- ---------------------------------------------------------------- leaving

local function leave_waiting_1(job, place)
  earlier.count('waiting_jobs', -1)
  earlier.count('waiting_tokens', -job.cost)
  earlier.count('waiting_bytes', -job.bytes)
  local less = tenants_1[job.tenant] or { jobs = 0, tokens = 0, bytes = 0 }
  less.jobs, less.tokens, less.bytes = less.jobs + 1, less.tokens + job.cost, less.bytes + job.bytes
  tenants_1[job.tenant] = less
  -- A lane of another tenant is not this job's.
  local lane = place.entry and place.lane and open(place.lane)
  if not lane or lane.tenant ~= job.tenant then return end
  lane.gone[#lane.gone + 1] = place.entry
  lane.jobs, lane.tokens = lane.jobs + 1, lane.tokens + job.cost
end

-- Remove what is listed as waiting and is no job.
function earlier.forget_member(id)
  try('ZREM', key('delayed'), id)
  try('ZREM', key('suspects'), id)
end

-- Delete all records of a job but its other keys, which are moved; at the end of the call, once the job is written
-- anew. `lease`: of one that has been pulled.
function earlier.forget(job, place, lease, keep_ms)
  if job.state == 'queued' then
    leave_waiting_1(job, place)
  else
    earlier.count(job.state == 'running' and 'running_jobs' or job.state, -1)
  end
  earlier.count('submitted', -1)
  has_gone[job.id] = true
  leaving[#leaving + 1] = {
    id = job.id, suffix = job.suffix, batch = job.batch, digest = job.digest, state = job.state, lease = lease,
    keep_ms = keep_ms,
  }
end

-- What remains of a hash tells clients of format 1 that submit the job again that it is known.
local function leave_trace(job)
  local hash = key('job', job.suffix)
  call('DEL', hash)
  call('HSET', hash, 'digest', job.digest, 'state', job.state)
  call('PEXPIRE', hash, job.keep_ms)
end

local function leave(job)
  for _, name in ipairs({ 'delayed', 'suspects', 'dead' }) do try('ZREM', key(name), job.id) end
  if job.lease then
    try('HDEL', LEASES, job.id)
    if job.lease.owner ~= '' then try('HDEL', key('held', job.lease.owner), job.id) end
  end
  local id = job.id
  try('ZREM', key('timers'), 'not_before|' .. id, 'ttl|' .. id, 'deadline|' .. id, 'retry|' .. id, 'stop|' .. id)
  if job.batch then try('ZREM', key('members', job.batch), id) end
  leave_trace(job)
end

-- The last writes about keys of format 1.
function earlier.finish()
  for _, job in ipairs(leaving) do leave(job) end
  for _, lane in pairs(lanes_1) do
    if #lane.gone > 0 then write_lane(lane) end
  end
  for tenant, less in pairs(tenants_1) do write_tenant(tenant, less) end
  for name, by in pairs(counted_1) do try('HINCRBY', COUNTERS_1, name, by) end
end

end
