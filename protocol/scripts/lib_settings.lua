-- Settings of a queue: validation and writing.

local WORDS = {
  durability = '^%S+$', features = '^[%w_,-]*$', mode = '^[a-z]+$', keep_prompts = '^[a-z]+$', keep_results = '^[01]$',
  export_batches = '^[01]$', paused = '^1$',
}

local NUMBERS = {}
for name in string.gmatch([[
  max_waiting_jobs max_waiting_tokens max_waiting_bytes max_outbox_entries max_outbox_bytes max_job_tokens partitions
  tenant_share_percent
  bytes_per_token age_step_ms channel_ttl_ms result_ttl_ms idempotency_ttl_ms max_failures reserve_tokens ms_per_token
  ttft_target_ms tpot_target_ms dead_set_max test_clock_ms test_clock_offset_ms
]], '%S+') do NUMBERS[name] = true end

-- The least value of each limit of a tenant. No job of a tenant with 0 running ones starts.
local LEAST_LIMITS = { max_running = 0, tokens_per_minute = 1 }

-- The limit and the tenant of a setting `<limit>:<tenant>`; nil for any other.
local function limited_by(name)
  local limit, tenant = string.match(name, '^([a-z_]+):([a-z0-9_-]+)$')
  if LEAST_LIMITS[limit or ''] then return limit, tenant end
end

-- Return the description of valid values if a setting is not valid, else nil.
local function refusal_of(name, value)
  local is_weight, limit = string.find(name, '^weight:[a-z0-9_-]+$'), limited_by(name)
  if not (is_weight or limit or WORDS[name] or NUMBERS[name]) then return 'the name of a setting' end
  if value == '' then return nil end
  if limit then
    local is_limit = (whole(value, LIMITS.MAX_TENANT_LIMIT) or -1) >= LEAST_LIMITS[limit]
    return not is_limit and 'a whole number from ' .. LEAST_LIMITS[limit] .. ' to LIMITS.MAX_TENANT_LIMIT' or nil
  end
  if is_weight then
    return not weight_in(value) and 'a number from LIMITS.MIN_WEIGHT to LIMITS.MAX_WEIGHT' or nil
  end
  if WORDS[name] then return not string.find(value, WORDS[name]) and 'of the form ' .. WORDS[name] or nil end
  if setting_in_range(name, value) then return nil end
  return (HAS_FRACTION[name] and 'a number from ' or 'a whole number from ') .. (LEAST[name] or 0)
end

-- Settings that the scores of lanes depend on.
local function order()
  if MODE ~= 'deadline' then return MODE end
  return MODE .. ' ' .. age_step() .. ' ' .. setting('ms_per_token', 0)
end

local function tenant_of_weight(name) return string.match(name, '^weight:(.+)$') end

local function write_one(name, value)
  local tenant = tenant_of_weight(name)
  local key, field = tenant and WEIGHTS or limited_by(name) and TENANT_LIMITS or KEYS[1], tenant or name
  if value == '' then call('HDEL', key, field) else call('HSET', key, field, value) end
  if key == KEYS[1] then SETTINGS[name] = value ~= '' and value or nil end
end

-- The first limit of a queue is being written.
local function load_limits()
INCLUDE lib_limits
end

-- After limits were written: `limited` tells other calls whether to look at them. The tenants of changed ones begin
-- anew.
local function begin_limits(pairs)
  local tenants = {}
  for i = 1, #pairs, 2 do
    local _, tenant = limited_by(pairs[i])
    if tenant then tenants[tenant] = true end
  end
  if not next(tenants) then return end
  if not limits then load_limits() end
  write_one('limited', call('HLEN', TENANT_LIMITS) > 0 and '1' or '')
  for tenant in next, tenants do limits.begin(tenant) end
end

-- Another order: every waiting lane gets a new score. The only operation whose cost grows with the number of lanes.
local function rescore(class)
  local heads = call('ZRANGE', heads_key(class), 0, -1)
  for i, tenant in ipairs(heads) do heads[i] = open_lane(class, tenant) end
  relist(heads)
end

-- The stamp `<letter><time>:<number>` tells workers whether they know the settings. The number grows with each change.
-- The time, in hexadecimal, is when the settings began. The letter is `c` while only workers have written settings
-- since then, and `a` otherwise, or if settings without a stamp were found.
local function read_stamp(stamp)
  local letter, began, number = string.match(stamp or '', '^([ac])(%x+):(%d+)$')
  return letter, began, tonumber(number)
end

local OF_WORKERS = { max_job_tokens = true, features = true, partitions = true }

local function stamp_change(pairs)
  local letter, began, number = read_stamp(SETTINGS.stamp)
  if not letter then return end
  for i = 1, #pairs, 2 do
    if not OF_WORKERS[pairs[i]] then letter = 'a' end
  end
  write_one('stamp', string.format('%s%s:%d', letter, began, number + 1))
end

-- Write checked settings: name, value, name, value … `has_more`: other calls write further ones, the last of them the
-- stamp.
local function write_settings(pairs, has_more)
  local before = order()
  for i = 1, #pairs, 2 do write_one(pairs[i], pairs[i + 1]) end
  MODE = SETTINGS.mode or DEFAULT_MODE
  if order() ~= before then
    for class = 0, LIMITS.MAX_PRIORITY do rescore(class) end
  end
  begin_limits(pairs)
  if not has_more then stamp_change(pairs) end
  -- A resumed queue or higher limits may make jobs ready.
  notify()
end
