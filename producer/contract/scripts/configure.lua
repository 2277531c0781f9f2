-- Write settings of a queue; an empty value removes one.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: name, value, name, value …
-- Reply: 'ok'.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

for i = 1, #ARGV, 2 do
  if string.find(ARGV[i], '^weight:') and ARGV[i + 1] ~= '' and not weight_of(ARGV[i + 1]) then
    return redis.error_reply('ERR ' .. ARGV[i] .. ' must be a number from LIMITS.MIN_WEIGHT to LIMITS.MAX_WEIGHT')
  end
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
