-- The classes and their lanes as one pull sees them: read once, changed in memory, and written by `finish`.

local classes = {}  -- the only name used outside

do

local AGE_STEP, EMPTY = age_step(), {}
local SIZE = LIMITS.MAX_LANES_PER_PULL
local listings, num_listings = {}, 0  -- class -> its lanes, or false if none waits
local num_unread = num_waiting_classes()

-- Where a pull begins in a class. Jobs of a low class that were returned are no reason for a full worker to interrupt
-- others: it looks at a few of their lanes, each pull at other ones, and continues with the classes above its own.
local function window_of(class)
  if class ~= RETURNED or not request.over then return 0, SIZE end
  local num_lanes = call('ZCARD', heads_key(RETURNED))
  if num_lanes <= LIMITS.MAX_RETURNED_PER_PULL then return 0, LIMITS.MAX_RETURNED_PER_PULL end
  return (request.number - 1) * LIMITS.MAX_RETURNED_PER_PULL % num_lanes, LIMITS.MAX_RETURNED_PER_PULL
end

-- Members and scores of a set of a class, the least first; none if another program's key is in its place.
local function read(key, class, first, size)
  local found = try('ZRANGE', key, text_of(first), text_of(first + size - 1), 'WITHSCORES')
  if failed(found) then
    sound_classes[class] = false
    return {}
  end
  return found
end

-- Lanes are in the order in which they are served: by score, and of equal ones the older head first.
local function insert(lanes, lane)
  local low, high = 1, #lanes + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local other = lanes[middle]
    if lane.score < other.score or lane.score == other.score and lane.at < other.at then
      high = middle
    else
      low = middle + 1
    end
  end
  table.insert(lanes, low, lane)
end

local function take_out(lanes, lane)
  for i, one in ipairs(lanes) do
    if one == lane then return table.remove(lanes, i) end
  end
end

local function add(listing, tenant, score, at)
  if listing.has_had[tenant] then return end
  listing.has_had[tenant] = true
  local lane = { tenant = tenant, score = tonumber(score), at = tonumber(at) }
  insert(listing.lanes, lane)
  listing.of_tenant[tenant] = lane
end

-- By score; of those that are not among the oldest heads, the times of their heads are read too.
local function add_by_score(listing)
  local heads, ready = listing.heads, read(ready_key(listing.class), listing.class, listing.num_read, SIZE + 1)
  if sound_classes[listing.class] == false then return end
  local at_of, unknown = as_map(heads), {}
  for i = 1, math.min(#ready, 2 * SIZE), 2 do
    if not at_of[ready[i]] then unknown[#unknown + 1] = ready[i] end
  end
  local found = #unknown > 0 and call('ZMSCORE', heads_key(listing.class), unpack(unknown)) or {}
  for i, tenant in ipairs(unknown) do at_of[tenant] = found[i] or NOW end
  for i = 1, math.min(#ready, 2 * SIZE), 2 do add(listing, ready[i], ready[i + 1], at_of[ready[i]]) end
  listing.limit, listing.rest_at = tonumber(ready[2 * SIZE + 2]) or math.huge, nil
  for i = 1, #heads, 2 do
    if not listing.of_tenant[heads[i]] and not listing.has_had[heads[i]] then
      -- Another user may have removed its score.
      if listing.limit == math.huge then
        add(listing, heads[i], MODE == 'fair' and served_of(heads[i]) or heads[i + 1], heads[i + 1])
      else
        listing.rest_at = listing.rest_at or tonumber(heads[i + 1])
      end
    end
  end
end

local function add_by_head(listing, heads, size)
  for i = 1, math.min(#heads, 2 * size), 2 do add(listing, heads[i], heads[i + 1], heads[i + 1]) end
  listing.limit = not request.over and tonumber(heads[2 * size + 2]) or math.huge
end

-- Leave out the lanes of tenants at their limits: limits that are new, since a parked tenant is not listed.
local function leave_out_limited(listing)
  local tenants, lanes_left = {}, {}
  for i, lane in ipairs(listing.lanes) do tenants[i] = lane.tenant end
  limits.read(tenants)
  for _, lane in ipairs(listing.lanes) do
    if limits.may_start(lane.tenant) then
      lanes_left[#lanes_left + 1] = lane
    else
      listing.of_tenant[lane.tenant] = nil
    end
  end
  listing.is_alone = listing.is_alone and #lanes_left > 0
  listing.lanes = lanes_left
end

-- What is needed of each lane and tenant, in one command each.
local function read_tenants(listing)
  if limits then leave_out_limited(listing) end
  local tenants = {}
  for i, lane in ipairs(listing.lanes) do tenants[i] = lane.tenant end
  if #tenants == 0 then return end
  open_lanes(listing.class, tenants)
  read_waiting(tenants)
  if MODE ~= 'fair' then return end
  read_served(tenants)
  read_weights(tenants)
end

-- `limit`: lanes of a greater score than this were not read. `rest_at`: the oldest head of those not read.
local function listing_of(class)
  if listings[class] ~= nil then return listings[class] end
  local first, size = window_of(class)
  local heads = num_unread > 0 and read(heads_key(class), class, first, size + 1) or EMPTY
  has_waiting[class] = #heads > 0
  if #heads == 0 then
    listings[class] = false
    return false
  end
  num_unread = num_unread - 1
  local listing = {
    class = class, lanes = {}, of_tenant = {}, has_had = {}, num_read = 0, heads = heads, limit = math.huge,
    is_alone = first == 0 and #heads == 2, is_scanned = false,
  }
  listing.is_by_head = class == RETURNED or MODE == 'fifo' or listing.is_alone
  if listing.is_by_head then add_by_head(listing, heads, size) else add_by_score(listing) end
  listing.num_read = size
  listings[class] = #listing.lanes > 0 and listing or false
  if listings[class] then
    num_listings = num_listings + 1
    read_tenants(listing)
  end
  return listings[class]
end

-- Read more lanes of a class. What this pull has changed in memory is not written yet, so the next ones are those
-- behind.
local function read_more(listing)
  if listing.is_by_head then
    add_by_head(listing, read(heads_key(listing.class), listing.class, listing.num_read, SIZE + 1), SIZE)
  else
    add_by_score(listing)
  end
  listing.num_read = listing.num_read + SIZE
  read_tenants(listing)
end

-- The lane to serve next. Nil if none is left, or if one that was not read may come before it.
local function scan(listing)
  if listing.is_scanned then return listing.best end
  local best = listing.lanes[1]
  listing.is_cut = listing.limit < math.huge and (not best or best.score > listing.limit)
  if listing.is_cut and listing.num_read < LIMITS.MAX_LANES_LISTED then
    read_more(listing)
    return scan(listing)
  end
  listing.best, listing.is_scanned = not listing.is_cut and best or nil, true
  return listing.best
end

local function oldest_of(listing)
  local oldest_at = listing.rest_at or math.huge
  for _, lane in ipairs(listing.lanes) do oldest_at = math.min(oldest_at, lane.at) end
  return oldest_at
end

local function best_of(class)
  local listing = listing_of(class)
  return listing and scan(listing)
end

-- ---------------------------------------------------------------- the class to serve next

local highest, lower = false, nil  -- `highest` is false when a head has changed

-- The classes in which lanes wait, the highest first.
local in_order
local function classes_in_order()
  if in_order then return in_order end
  in_order = {}
  for class = LIMITS.MAX_PRIORITY, 0, -1 do
    if listing_of(class) then in_order[#in_order + 1] = class end
  end
  return in_order
end

-- The highest class that waits, and of those below it the one with the highest effective priority: class plus age of
-- its oldest head by the step. An older head wins a tie.
local function find_classes()
  if highest ~= false then return end
  local lower_rank, lower_at
  highest, lower = nil, nil
  for _, class in ipairs(classes_in_order()) do
    local has_lane = best_of(class)
    -- Its next lane is unknown: no lower class is served before it.
    if not highest and listings[class].is_cut then return end
    if has_lane then
      local at = highest and oldest_of(listings[class])
      local rank = highest and class + (NOW - at) / AGE_STEP
      if not highest then
        highest = class
      elseif not lower or rank > lower_rank or rank == lower_rank and at < lower_at then
        lower, lower_rank, lower_at = class, rank, at
      end
    end
  end
end

-- Tokens that the classes below the highest may take: their share of what the highest has taken while they waited.
local LOWER = ':lower'
local SHARE_RATIO = LIMITS.LOWER_CLASSES_SHARE / (1 - LIMITS.LOWER_CLASSES_SHARE)

-- Whether the next job of a class costs no more than the share saved for it. `due_at`: the cost of that job, as far as
-- this pull knows it.
local due_at = 0
local function is_due(class, cost_of_head)
  local share = served_of(LOWER)
  if share <= 0 or share < due_at then return false end
  due_at = cost_of_head(class, best_of(class).tenant)
  return share >= due_at
end

-- The class to serve next, its lane, and the share that each token of its next job adds, or takes. Without ageing,
-- classes are strict. The share is granted when a place is free: it is not a reason to interrupt a job.
function classes.next(cost_of_head)
  if best_of(RETURNED) then return listings[RETURNED], listings[RETURNED].best, 0 end
  find_classes()
  if not highest or request.over and highest <= request.over then return nil end
  local class, share = highest, 0
  if lower and AGE_STEP > 0 then
    share = SHARE_RATIO
    if not request.over and is_due(lower, cost_of_head) then class, share = lower, -1 end
  end
  return listings[class], listings[class].best, share
end

function classes.note_share(tokens)
  if tokens == 0 then return end
  set_served(LOWER, served_of(LOWER) + tokens)
  if tokens < 0 then due_at = 0 end
end

-- Whether lanes were not read that may be next.
function classes.are_cut()
  for _, listing in pairs(listings) do
    if listing and listing.is_cut then return true end
  end
  return false
end

-- ---------------------------------------------------------------- changes

local function change(listing)
  listing.is_scanned = false
  if listing.class ~= RETURNED and (lower or not listing.is_alone) then highest = false end
end

function classes.remove(listing, lane)
  take_out(listing.lanes, lane)
  listing.of_tenant[lane.tenant], listing.is_alone = nil, false
  change(listing)
  highest = false
end

function classes.remove_tenant(tenant)
  for _, listing in pairs(listings) do
    local lane = listing and listing.of_tenant[tenant]
    if lane then classes.remove(listing, lane) end
  end
end

function classes.move(listing, lane, at, score)
  if at == lane.at and score == lane.score then return end
  take_out(listing.lanes, lane)
  lane.at, lane.score = at, score
  insert(listing.lanes, lane)
  change(listing)
end

-- Charge a job at its start by the least and greatest scores of the tenants that wait in its class.
local function charge_in(listing, job)
  if not listing then return charge_at_start(job) end
  scan(listing)
  local alone = listing.is_alone and listing.best and listing.best.tenant
  if alone then return charge_at_start(job, { alone = alone }) end
  local key = ready_key(job.class)
  if not listing.greatest then
    local last = call('ZRANGE', key, 0, 0, 'REV', 'WITHSCORES')
    listing.greatest = tonumber(last[2] or '') or 0
    listing.num_more = math.max(0, call('ZCARD', key) - #listing.lanes)
  end
  local least = listing.best and listing.best.score or math.min(listing.limit, listing.greatest)
  charge_at_start(job, { least = least, greatest = listing.greatest, num_waiting = #listing.lanes + listing.num_more })
end

-- Charge a job at its start, and move its tenant in every class.
function classes.charge(job)
  local listing = listing_of(job.class)
  charge_in(listing, job)
  -- A tenant alone in the only class that waits needs no position.
  if listing and listing.is_alone and num_listings == 1 then return end
  local served = served_of(job.tenant)
  for _, one in pairs(listings) do
    local lane = one and one.class ~= RETURNED and one.of_tenant[job.tenant]
    if lane then
      if one.greatest then one.greatest = math.max(one.greatest, served) end
      classes.move(one, lane, lane.at, served)
    end
  end
end

end
