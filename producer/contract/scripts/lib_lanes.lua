-- Lanes: the waiting entries of one tenant in one class, their numbers, and their place among others.

-- A lane's numbers in `depth`: waiting jobs and tokens, ever added, ever taken. Read once, written once by `finish`.
local lanes = {}

local function is_type(key, wanted)
  local found = call('TYPE', key).ok
  return found == wanted or found == 'none'
end

local sound_classes = {}
local function is_sound_class(class)
  if sound_classes[class] == nil then
    sound_classes[class] = is_type(PREFIX .. 'heads:' .. class, 'zset') and is_type(PREFIX .. 'ready:' .. class, 'zset')
  end
  return sound_classes[class]
end

local function open_lane(class, tenant)
  local name = class .. ':' .. tenant
  local lane = lanes[name]
  if lane then return lane end
  lane = { name = name, class = class, tenant = tenant, key = lane_key(class, tenant), is_changed = false }
  lane.is_sound = is_type(lane.key, 'stream') and is_sound_class(class)
  local numbers = {}
  for number in string.gmatch(call('HGET', DEPTH, name) or '', '%d+') do numbers[#numbers + 1] = tonumber(number) end
  lane.jobs, lane.tokens = numbers[1] or 0, numbers[2] or 0
  lane.added, lane.added_tokens = numbers[3] or 0, numbers[4] or 0
  lane.taken, lane.taken_tokens = numbers[5] or 0, numbers[6] or 0
  lanes[name] = lane
  return lane
end

-- Virtual tokens of a tenant; the field `:time` holds those of the tenant that was served last. Read once, written once
-- by `finish`.
local VIRTUAL_TIME = ':time'
local served, charged = {}, {}
local function served_of(tenant)
  if not served[tenant] then served[tenant] = tonumber(call('HGET', SERVED, tenant) or '') or 0 end
  return served[tenant]
end

local function set_served(tenant, tokens)
  served[tenant] = math.max(0, tokens)
  charged[tenant] = true
end

-- A tenant that comes back is lifted to the least of those who wait: nobody saves up by staying away.
local function lift_served(class, tenant)
  local least = tonumber(call('ZRANGE', PREFIX .. 'ready:' .. class, 0, 0, 'WITHSCORES')[2] or '')
  local floor = least or served_of(VIRTUAL_TIME)
  if served_of(tenant) < floor then set_served(tenant, floor) end
end

-- Charge a tenant, or give it back with a negative number.
local function charge(tenant, tokens)
  local weight = tonumber(SETTINGS['weight:' .. tenant]) or 1
  set_served(tenant, served_of(tenant) + tokens / weight)
end

-- Move a tenant's lanes to their new place in every class where it waits.
local function write_served()
  for tenant in pairs(charged) do
    call('HSET', SERVED, tenant, served[tenant])
    if tenant ~= VIRTUAL_TIME then
      for class = 0, LIMITS.MAX_PRIORITY do
        try('ZADD', PREFIX .. 'ready:' .. class, 'XX', served[tenant], tenant)
      end
    end
  end
end

-- Tenants that are no longer ahead of others would be lifted anyway when they come back: beyond a number they are
-- forgotten, a few at a time.
local function forget_served()
  if call('HLEN', SERVED) <= LIMITS.SERVED_KEPT then return end
  local floor = served_of(VIRTUAL_TIME)
  for _, tenant in ipairs(call('HRANDFIELD', SERVED, LIMITS.MAX_BITE)) do
    local waits = tenant == VIRTUAL_TIME
    for class = 0, LIMITS.MAX_PRIORITY do
      waits = waits or is_sound_class(class) and call('ZSCORE', PREFIX .. 'heads:' .. class, tenant)
    end
    if not waits and served_of(tenant) <= floor then call('HDEL', SERVED, tenant) end
  end
end

-- Where a lane stands in its class: least first. fair: virtual tokens; deadline: slack of its head, which orders like
-- deadline less the time its cost takes; fifo: submit time of its head.
local NO_DEADLINE = 9e15
local function score_of(lane, at, head)
  if lane.class == RETURNED or MODE == 'fifo' then return at end
  if MODE == 'fair' then return served_of(lane.tenant) end
  if not head or not head.deadline then return NO_DEADLINE end
  return head.deadline - head.cost * setting('ms_per_token', 0)
end

-- A class whose own key is foreign lists nothing; its lanes are unsound, so nothing is added to them.
local function list_lane(lane, at, score)
  try('ZADD', PREFIX .. 'heads:' .. lane.class, at, lane.tenant)
  try('ZADD', PREFIX .. 'ready:' .. lane.class, score, lane.tenant)
end

local function unlist_lane(lane)
  try('ZREM', PREFIX .. 'heads:' .. lane.class, lane.tenant)
  try('ZREM', PREFIX .. 'ready:' .. lane.class, lane.tenant)
end

-- Put a job's one valid entry at the end of a lane; `at` is the time it is ordered by, and what was published must be
-- computed again like prompt. The lane must be sound; the caller writes the job.
local function add_entry(job, class, at, published)
  local lane = open_lane(class, job.tenant)
  local is_first = not lane.has_entries and not call('ZSCORE', PREFIX .. 'heads:' .. class, job.tenant)
  if is_first then
    if MODE == 'fair' and class ~= RETURNED then lift_served(class, job.tenant) end
    list_lane(lane, at, score_of(lane, at, job))
  end
  lane.has_entries = true
  job.lane = lane.name
  job.entry = call(
    'XADD', lane.key, '*', 'job', job.id, 'prompt', job.prompt + published, 'cost', job.cost, 'choices', job.choices,
    'at', at
  )
  lane.added = lane.added + 1
  lane.jobs = lane.jobs + 1
  job.number, job.before = lane.added, lane.added_tokens
  lane.added_tokens = lane.added_tokens + job.cost
  lane.tokens = lane.tokens + job.cost
  lane.is_changed = true
  ring()
end

-- Take a job's entry off its lane, when it has one. `finish` finds the lane's new head.
local function remove_entry(job, is_taken)
  local class, tenant = string.match(job.lane, '^([^:]+):(.+)$')
  local lane = open_lane(class, tenant)
  if lane.is_sound then call('XDEL', lane.key, job.entry) end
  lane.jobs = math.max(0, lane.jobs - 1)
  lane.tokens = math.max(0, lane.tokens - job.cost)
  if is_taken then
    lane.taken = lane.taken + 1
    lane.taken_tokens = lane.taken_tokens + job.cost
  end
  lane.is_changed, lane.has_lost = true, true
  job.entry, job.lane = nil, nil
end

-- What `add_entry` wrote, or nil when an entry is not of ours.
local function parse_entry(entry)
  local fields = entry[2]
  if fields[1] ~= 'job' or fields[9] ~= 'at' then return nil end
  local prompt, cost, choices, at = tonumber(fields[4]), tonumber(fields[6]), tonumber(fields[8]), tonumber(fields[10])
  if not (prompt and cost and choices and at) then return nil end
  return { id = entry[1], job = fields[2], prompt = prompt, cost = cost, choices = choices, at = at }
end

-- Point a lane's class at its head; a foreign head stands there as if it had come now.
local function list_head(lane, head)
  local at = head and head.at or NOW
  local job = MODE == 'deadline' and lane.class ~= RETURNED and head and load_job(head.job) or nil
  list_lane(lane, at, score_of(lane, at, job))
end

-- A lane that lost entries: point its class at the new head, or forget the lane when it is empty.
local function relist(lane)
  if not lane.is_sound then return unlist_lane(lane) end
  local first = call('XRANGE', lane.key, '-', '+', 'COUNT', 1)[1]
  if first then
    return list_head(lane, parse_entry(first))
  end
  call('DEL', lane.key)
  call('HDEL', DEPTH, lane.name)
  unlist_lane(lane)
  lane.is_changed = false
end
