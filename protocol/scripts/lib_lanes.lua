-- Lanes: the waiting entries of one tenant in one class, their totals, and their position in the class.

-- A lane's numbers in `depth`: waiting jobs and tokens, ever added, ever taken. Read once, written once by `finish`.
local lanes = {}

local function is_type(key, wanted)
  local found = call('TYPE', key).ok
  return found == wanted or found == 'none'
end

-- Whether the keys of a class have the right type, and whether a tenant may wait in it. Looked up once a call.
local sound_classes, has_waiting = {}, {}
local function is_sound_class(class)
  if sound_classes[class] == nil then
    local ready = call('TYPE', ready_key(class)).ok
    has_waiting[class] = has_waiting[class] or ready ~= 'none'
    sound_classes[class] = is_type(heads_key(class), 'zset') and (ready == 'zset' or ready == 'none')
  end
  return sound_classes[class]
end

-- `depth`: its field of that hash. `is_sound`: as far as the caller knows; its key is looked at otherwise.
local function new_lane(class, tenant, depth, is_sound)
  local lane = {
    name = lane_name(class, tenant), class = class, tenant = tenant, key = lane_key(class, tenant), is_changed = false,
    gone = {}, head = nil, has_lost = false, num_spoiled = 0,
  }
  lane.is_sound = is_sound or is_type(lane.key, 'stream') and is_sound_class(class)
  local jobs, tokens, added, added_tokens, taken, taken_tokens =
    string.match(depth or '', '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
  lane.jobs, lane.tokens = whole(jobs, LIMITS.MAX_NUMBER) or 0, whole(tokens, LIMITS.MAX_NUMBER) or 0
  lane.added, lane.added_tokens = whole(added, LIMITS.MAX_NUMBER) or 0, whole(added_tokens, LIMITS.MAX_NUMBER) or 0
  lane.taken, lane.taken_tokens = whole(taken, LIMITS.MAX_NUMBER) or 0, whole(taken_tokens, LIMITS.MAX_NUMBER) or 0
  lanes[lane.name] = lane
  return lane
end

local function open_lane(class, tenant)
  class = tonumber(class) or class
  local name = lane_name(class, tenant)
  local lane = lanes[name]
  if lane then return lane end
  return new_lane(class, tenant, call('HGET', DEPTH, name))
end

-- Open lanes of a class that are about to be read, in one command. A type is checked when its lane is read.
local function open_lanes(class, tenants)
  local names = {}
  for i, tenant in ipairs(tenants) do names[i] = lane_name(class, tenant) end
  local found = call('HMGET', DEPTH, unpack(names))
  for i, tenant in ipairs(tenants) do
    if not lanes[names[i]] then new_lane(class, tenant, found[i], true) end
  end
end

-- Weights and limits are apart from the settings, which every call reads whole: there may be some for each tenant.
local WEIGHTS, TENANT_LIMITS = PREFIX .. 'weights', PREFIX .. 'limits'
local weight_in, weight_of, read_weights

do

local weights = {}

-- A weight in `limits`, or nil. NaN is not.
function weight_in(text)
  local weight = tonumber(text or '')
  return weight and weight >= LIMITS.MIN_WEIGHT and weight <= LIMITS.MAX_WEIGHT and weight or nil
end

function read_weights(tenants)
  local found = try('HMGET', WEIGHTS, unpack(tenants))
  for i, tenant in ipairs(tenants) do weights[tenant] = not failed(found) and weight_in(found[i]) or 1 end
end

function weight_of(tenant)
  if not weights[tenant] then read_weights({ tenant }) end
  return weights[tenant]
end

end

-- The names used outside: a script may have 200 locals.
local served_of, read_served, set_served, lift_served, charge, charge_at_start, write_served, forget_served

do

-- Virtual tokens of a tenant. The field `:time` holds those of the tenant that was served last, `:<class>` the least
-- that a tenant has when it joins others in that class. Read once, written once by `finish`.
local VIRTUAL_TIME = ':time'
local served, charged = {}, {}
-- Charges of jobs of the only tenant that waits in a class, before they are noted: nothing is compared with them.
local open_charges, note_charges
local function is_tenant(name) return string.sub(name, 1, 1) ~= ':' end
-- nan and infinity would remove a tenant from its class for good.
local function tokens_in(text)
  local tokens = tonumber(text or '')
  return tokens and tokens >= 0 and tokens <= LIMITS.MAX_NUMBER and tokens or 0
end
function served_of(tenant)
  if open_charges and open_charges.tenant == tenant then note_charges() end
  if not served[tenant] then served[tenant] = tokens_in(call('HGET', SERVED, tenant)) end
  return served[tenant]
end

function read_served(tenants)
  for i, text in ipairs(call('HMGET', SERVED, unpack(tenants))) do
    served[tenants[i]] = served[tenants[i]] or tokens_in(text)
  end
end

function set_served(tenant, tokens)
  served[tenant] = math.max(0, math.min(tokens, LIMITS.MAX_NUMBER))
  charged[tenant] = true
end

-- The least and the greatest virtual tokens of the tenants waiting in a class, or nil.
local function range_of(class)
  local ready = ready_key(class)
  local least = call('ZRANGE', ready, 0, 0, 'WITHSCORES')[2]
  local greatest = call('ZRANGE', ready, 0, 0, 'REV', 'WITHSCORES')[2]
  return tonumber(least or ''), tonumber(greatest or '')
end

-- Raise a returning tenant to the virtual time of the class, so that it cannot save up tokens by staying away. This is
-- not always the least value of the waiting tenants: an endless row of new tenants would then starve those ahead. The
-- virtual time advances with the charges in the class, at most to just behind the last tenant.
function lift_served(class, tenant)
  local least, greatest = range_of(class)
  local floor = least and math.max(least, math.min(greatest + 1, served_of(':' .. class))) or served_of(VIRTUAL_TIME)
  if served_of(tenant) < floor then set_served(tenant, floor) end
end

-- Charge the tenant of a job, or refund it with a negative number. The virtual time of the class advances by the charge
-- per waiting tenant (`waiting`, if the caller knows their number), and never moves back: another number of tenants may
-- wait at the refund, which could then exceed the advance, again and again.
function charge(job, tokens, waiting)
  note_charges()
  local virtual = tokens / weight_of(job.tenant)
  set_served(job.tenant, served_of(job.tenant) + virtual)
  if virtual <= 0 then return end
  waiting = waiting or is_sound_class(job.class) and call('ZCARD', ready_key(job.class)) or 0
  if waiting > 0 then set_served(':' .. job.class, served_of(':' .. job.class) + virtual / waiting) end
end

local function add_charge(job, tokens)
  local charges = open_charges
  if not charges or charges.tenant ~= job.tenant or charges.class ~= job.class then
    note_charges()
    charges = { tenant = job.tenant, class = job.class, total = 0 }
    open_charges = charges
  end
  charges.total, charges.last = charges.total + tokens, tokens
end

function note_charges()
  local charges = open_charges
  open_charges = nil
  if not charges then return end
  -- As if each had been charged by itself: the virtual time is that before the last one.
  local served_before = served_of(charges.tenant)
  local total = charges.total / weight_of(charges.tenant)
  set_served(charges.tenant, served_before + total)
  set_served(VIRTUAL_TIME, served_before + total - charges.last / weight_of(charges.tenant))
  set_served(':' .. charges.class, served_before + total)
end

-- The charge of a job at its start. It also moves the virtual time of the class between the waiting tenants: `waiting`
-- has the least and the greatest of their virtual tokens and how many they are, or the only one; nil if none waits.
function charge_at_start(job, waiting)
  local tokens = job.cost - (job.charged or 0)
  job.charged = job.cost
  local alone = waiting and waiting.alone
  if alone == job.tenant and tokens > 0 then return add_charge(job, tokens) end
  note_charges()
  local least, greatest = waiting and waiting.least, waiting and waiting.greatest
  if alone then
    least = served_of(alone)
    greatest = least
  end
  set_served(VIRTUAL_TIME, served_of(job.tenant))
  if least then set_served(':' .. job.class, math.max(least, math.min(greatest, served_of(':' .. job.class)))) end
  charge(job, tokens, waiting and (alone and 1 or waiting.num_waiting) or 0)
end

-- Move the lanes of charged tenants to their new positions in every class where some wait.
function write_served()
  note_charges()
  local flat, moved = {}, {}
  for tenant in pairs(charged) do
    flat[#flat + 1], flat[#flat + 2] = tenant, served[tenant]
    if is_tenant(tenant) then moved[#moved + 1], moved[#moved + 2] = served[tenant], tenant end
  end
  if #flat > 0 then call('HSET', SERVED, unpack(flat)) end
  if #flat > 2 * MANY then hash_for_many(SERVED) end
  if #moved == 0 then return end
  for class = 0, LIMITS.MAX_PRIORITY do
    if has_waiting[class] == nil then has_waiting[class] = call('TYPE', ready_key(class)).ok ~= 'none' end
    if has_waiting[class] then try('ZADD', ready_key(class), 'XX', unpack(moved)) end
  end
end

local function num_lanes_of_classes()
  local total = 0
  for class = 0, LIMITS.MAX_PRIORITY do
    if is_sound_class(class) then total = total + call('ZCARD', heads_key(class)) end
  end
  return total
end

local function waits(tenant)
  for class = 0, LIMITS.MAX_PRIORITY do
    if is_sound_class(class) and call('ZSCORE', heads_key(class), tenant) then return true end
  end
  return false
end

-- Delete tenants that do not wait, above a limit, from a few per call: those that are not ahead of the virtual time,
-- since they would be raised to it on return. If there are none, the half that is ahead the least: tenants that come
-- for one job each are all ahead by that job.
function forget_served()
  local num_kept = call('HLEN', SERVED)
  if num_kept <= LIMITS.SERVED_KEPT or num_kept <= LIMITS.SERVED_KEPT + num_lanes_of_classes() then return end
  local idle, num_behind = {}, 0
  for _, tenant in ipairs(call('HRANDFIELD', SERVED, LIMITS.SLICE_JOBS)) do
    if is_tenant(tenant) and not waits(tenant) then
      idle[#idle + 1] = tenant
      if served_of(tenant) <= served_of(VIRTUAL_TIME) then num_behind = num_behind + 1 end
    end
  end
  table.sort(idle, function(a, b) return served_of(a) < served_of(b) end)
  for i = 1, num_behind > 0 and num_behind or math.floor(#idle / 2) do call('HDEL', SERVED, idle[i]) end
end

end

-- Waiting time that raises a lane by one class; 0 is never.
local function age_step() return setting('age_step_ms', LIMITS.DEFAULT_AGE_STEP_S * 1000) end

-- A job without a deadline is ordered as if it had one some steps after its submit, so that it cannot starve.
local function deadline_of(at, head)
  if head and head.deadline then return head.deadline end
  local step = age_step()
  return step > 0 and at + LIMITS.STEPS_WITHOUT_DEADLINE * step or 9e15
end

-- The score of a lane in its class, least first. fair: virtual tokens; deadline: slack of its head, which orders like
-- deadline less the time its cost takes; fifo: submit time of its head.
local function score_of(lane, at, head)
  if lane.class == RETURNED or MODE == 'fifo' then return at end
  if MODE == 'fair' then return served_of(lane.tenant) end
  return deadline_of(at, head) - (head and head.cost or 0) * setting('ms_per_token', 0)
end

-- A class whose key has the wrong type lists nothing; its lanes are unsound, so nothing is added to them. The lanes of
-- a parked tenant are not listed.
local function list_lane(lane, at, score)
  if limits and limits.is_parked(lane.tenant) then return end
  try('ZADD', heads_key(lane.class), at, lane.tenant)
  try('ZADD', ready_key(lane.class), score, lane.tenant)
  has_waiting[lane.class] = true
end

local function unlist_lane(lane)
  try('ZREM', heads_key(lane.class), lane.tenant)
  try('ZREM', ready_key(lane.class), lane.tenant)
end

-- Append the entry of a job to a lane. `at` is the time it is ordered by. The lane must be sound; the caller writes the
-- job. Returns whether the lane took it: not if its user has added the last possible id. A pull then discards what is
-- foreign, and deletes the lane once it is empty.
local function add_entry(job, class, at)
  local lane = open_lane(class, job.tenant)
  local entry = try('XADD', lane.key, '*', 'job', job.id, 'at', text_of(at))
  if failed(entry) then
    list_lane(lane, NOW, score_of(lane, NOW))
    return false
  end
  local is_parked = limits and limits.is_parked(job.tenant)
  local is_first = is_parked and lane.jobs == 0
    or not is_parked and not lane.has_entries and not call('ZSCORE', heads_key(class), job.tenant)
  if is_first then
    if MODE == 'fair' and class ~= RETURNED then lift_served(class, job.tenant) end
    list_lane(lane, at, score_of(lane, at, job))
  end
  lane.has_entries, lane.head = true, nil
  job.lane, job.entry = lane.name, entry
  lane.added = lane.added + 1
  lane.jobs = lane.jobs + 1
  job.number, job.before = lane.added, lane.added_tokens
  lane.added_tokens = lane.added_tokens + job.cost
  lane.tokens = lane.tokens + job.cost
  lane.is_changed = true
  if not is_parked then notify() end
  return true
end

-- Remove the entry of a job from its lane. `finish` deletes all removed entries of a lane at once and finds its new
-- head.
local function remove_entry(job, is_taken)
  local lane = lanes[job.lane] or open_lane(string.match(job.lane, '^([^:]+):(.+)$'))
  if lane.is_sound then lane.gone[#lane.gone + 1] = job.entry end
  lane.jobs, lane.tokens = lane.jobs - 1, lane.tokens - job.cost
  if is_taken then
    lane.taken = lane.taken + 1
    lane.taken_tokens = lane.taken_tokens + job.cost
  end
  lane.is_changed, lane.has_lost = true, true
  job.entry, job.lane = false, false
end

-- Parse an entry of `add_entry`; nil if another program wrote it.
local function parse_entry(entry)
  local fields = entry[2]
  local at = fields[1] == 'job' and fields[3] == 'at' and whole(fields[4], LIMITS.MAX_NUMBER)
  return at and { id = entry[1], job = fields[2], at = at } or nil
end

-- The time and the score of a lane by its head. A foreign head counts as submitted now.
local function place_of(lane, head)
  local at = head and head.at or NOW
  local job = MODE == 'deadline' and lane.class ~= RETURNED and head and load_job(head.job) or nil
  return at, score_of(lane, at, job)
end

-- Delete the entries that a lane lost; return its new head, or nil if it is empty. `lane.head`: the head that a pull
-- has read, false if none is left; all that the lane lost was before it. To find one entry, a stream walks from the
-- start of its node, so one cut costs less than as many deletions.
local function delete_entries(lane)
  local head, gone = lane.head, lane.gone
  lane.gone = {}
  if head == false then return nil end
  if head and #gone > 1 then
    call('XTRIM', lane.key, 'MINID', head[1])
  else
    call_in_parts('XDEL', lane.key, gone)
  end
  return head or call('XRANGE', lane.key, '-', '+', 'COUNT', '1')[1]
end

-- Update lanes that lost entries: list each by its new head, or delete it if it is empty. Another mode lists all lanes
-- again: a thousand at once, since Lua passes at most about 8,000 values to a command.
local function relist(lost)
  for from = 1, #lost, 1000 do
    local listed, empty_keys, empty_names = {}, {}, {}
    for i = from, math.min(from + 999, #lost) do
      local lane = lost[i]
      local first = lane.is_sound and delete_entries(lane)
      if first and limits and limits.is_parked(lane.tenant) then
        unlist_lane(lane)
      elseif first then
        local of_class = listed[lane.class] or { heads = {}, ready = {} }
        listed[lane.class] = of_class
        local heads, ready, at, score = of_class.heads, of_class.ready, place_of(lane, parse_entry(first))
        heads[#heads + 1], heads[#heads + 2] = at, lane.tenant
        ready[#ready + 1], ready[#ready + 2] = score, lane.tenant
      else
        unlist_lane(lane)
        lane.is_changed = lane.is_changed and not lane.is_sound
        if lane.is_sound then
          empty_keys[#empty_keys + 1], empty_names[#empty_names + 1] = lane.key, lane.name
        end
      end
    end
    for class, of_class in pairs(listed) do
      try('ZADD', heads_key(class), unpack(of_class.heads))
      try('ZADD', ready_key(class), unpack(of_class.ready))
      has_waiting[class] = true
    end
    if #empty_keys > 0 then
      call('DEL', unpack(empty_keys))
      call('HDEL', DEPTH, unpack(empty_names))
    end
  end
end

-- The last writes about lanes.
local function write_lanes()
  local lost, depths = {}, {}
  for _, lane in pairs(lanes) do
    if lane.has_lost then lost[#lost + 1] = lane end
  end
  relist(lost)
  for name, lane in pairs(lanes) do
    if lane.is_changed then
      depths[#depths + 1], depths[#depths + 2] = name, string.format('%d %d %d %d %d %d', math.max(0, lane.jobs),
        math.max(0, lane.tokens), lane.added, lane.added_tokens, lane.taken, lane.taken_tokens)
    end
  end
  call_in_parts('HSET', DEPTH, depths)
  if #depths > 2 * MANY then hash_for_many(DEPTH) end
end

-- Charge the tenant of a job further, or refund it with a negative number.
local function charge_tenant(job, tokens)
  if MODE == 'fair' then charge(job, tokens) end
  if limits then limits.charge(job.tenant, tokens) end
end
