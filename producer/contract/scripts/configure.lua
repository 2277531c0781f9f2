-- Write settings of a queue; an empty value removes one.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: name, value, name, value …
-- Reply: 'ok'.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local WORDS = {
  durability = '^%S+$', features = '^[%w_,-]*$', mode = '^[a-z]+$', keep_prompts = '^[a-z]+$', keep_results = '^[01]$',
  export_batches = '^[01]$', paused = '^1$',
}

local NUMBERS = {}
for name in string.gmatch([[
  max_waiting_jobs max_waiting_tokens max_waiting_bytes max_outbox_entries max_outbox_bytes max_job_tokens partitions
  bytes_per_token age_step_ms channel_ttl_ms result_ttl_ms idempotency_ttl_ms max_failures reserve_tokens ms_per_token
  dead_set_max test_clock_ms test_clock_offset_ms
]], '%S+') do NUMBERS[name] = true end

-- What a setting must be, if it is not that.
local function refusal_of(name, value)
  local is_weight = string.find(name, '^weight:[a-z0-9_-]+$')
  if not (is_weight or WORDS[name] or NUMBERS[name]) then return 'the name of a setting' end
  if value == '' then return nil end
  if is_weight then
    return not weight_of(value) and 'a number from LIMITS.MIN_WEIGHT to LIMITS.MAX_WEIGHT' or nil
  end
  if WORDS[name] then return not string.find(value, WORDS[name]) and 'of the form ' .. WORDS[name] or nil end
  if setting_in_range(name, value) then return nil end
  return (HAS_FRACTION[name] and 'a number from ' or 'a whole number from ') .. (LEAST[name] or 0)
end

-- All are checked before one is written.
for i = 1, #ARGV, 2 do
  local wanted = not ARGV[i + 1] and 'followed by its value' or refusal_of(ARGV[i], ARGV[i + 1])
  if wanted then return redis.error_reply('ERR ' .. ARGV[i] .. ' must be ' .. wanted) end
end

-- Settings that the scores of lanes depend on.
local function order()
  if MODE ~= 'deadline' then return MODE end
  return MODE .. ' ' .. age_step() .. ' ' .. setting('ms_per_token', 0)
end
local before = order()

local function write(name, value)
  if value == '' then call('HDEL', KEYS[1], name) else call('HSET', KEYS[1], name, value) end
  SETTINGS[name] = value ~= '' and value or nil
end

-- Another order: every waiting lane gets a new score. The only operation whose cost grows with the number of lanes.
local function rescore(class)
  local heads = call('ZRANGE', PREFIX .. 'heads:' .. class, 0, -1)
  for _, tenant in ipairs(heads) do relist(open_lane(class, tenant)) end
end

for i = 1, #ARGV, 2 do write(ARGV[i], ARGV[i + 1]) end
MODE = SETTINGS.mode or DEFAULT_MODE
if order() ~= before then
  for class = 0, LIMITS.MAX_PRIORITY do rescore(class) end
end
-- A resumed queue or higher limits may make jobs ready.
notify()
finish()
return 'ok'
