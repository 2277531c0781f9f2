-- include: lib_settings
-- Return the settings of a queue. If they were lost since the caller read them, restore those that it remembers,
-- without overwriting newer values.
--
-- KEYS: config, then the fixed keys of the queue. ARGV: stamp of the settings that the caller remembers (empty: none),
--   then name and value of each setting that it remembers.
-- Reply: {stamp, {name, value …} of all settings, {name, value …} of those written again}.
-- Reads: alive, buckets, depth, heads, held, job, lane, leased, limits, parked, ready, served, weights.
-- Writes: bell, buckets, config, depth, heads, lane, leased, limits, parked, ready, served, weights.
-- Bound: all settings, weights and limits; as `configure` if some were lost.

write_even_when_full()
local wrong = wrong_key(nil, WEIGHTS, TENANT_LIMITS)
if wrong then return wrong end
if #ARGV % 2 ~= 1 then return wrong_arguments() end
local _, began, number = read_stamp(SETTINGS.stamp)
local _, known_began, known_number = read_stamp(ARGV[1])

local function is_known(name)
  local tenant = tenant_of_weight(name)
  if tenant then return call('HEXISTS', WEIGHTS, tenant) == 1 end
  if limited_by(name) then return call('HEXISTS', TENANT_LIMITS, name) == 1 end
  return SETTINGS[name]
end

-- A test's clock does not come back, nor what only a newer version or another program can have written.
local function is_gone(name, value)
  return not is_known(name) and value ~= '' and not string.find(name, '^test_') and not refusal_of(name, value)
end

-- Another beginning, or fewer changes than the caller has seen: Redis has lost settings.
local function gone_settings()
  local gone = {}
  if not known_began or known_began == began and known_number <= number then return gone end
  for i = 2, #ARGV, 2 do
    if is_gone(ARGV[i], ARGV[i + 1]) then gone[#gone + 1], gone[#gone + 2] = ARGV[i], ARGV[i + 1] end
  end
  return gone
end

local function new_stamp()
  for name in pairs(SETTINGS) do
    if not refusal_of(name, '') and not string.find(name, '^test_') then return string.format('a%012x:0', NOW) end
  end
  return string.format('%s%012x:0', call('EXISTS', WEIGHTS, TENANT_LIMITS) > 0 and 'a' or 'c', NOW)
end

local function all_settings()
  local all, known = call('HGETALL', KEYS[1]), call('HGETALL', WEIGHTS)
  for i = 1, #known, 2 do all[#all + 1], all[#all + 2] = 'weight:' .. known[i], known[i + 1] end
  for _, text in ipairs(call('HGETALL', TENANT_LIMITS)) do all[#all + 1] = text end
  return all
end

local gone = gone_settings()
if known_began and (not began or known_began < began) then
  write_one('stamp', 'a' .. known_began .. ':0')
elseif not began then
  write_one('stamp', new_stamp())
end
if #gone > 0 then write_settings(gone) end
finish()
return { SETTINGS.stamp, all_settings(), gone }
