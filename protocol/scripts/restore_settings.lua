-- include: lib_settings
-- Return the settings of a queue, a page of those of tenants with each call. If settings were lost since the caller
-- read them, restore those that it remembers, without overwriting newer values.
--
-- KEYS: config. ARGV: stamp of the settings that the caller remembers (empty: none);
--   the page, '' for the first; 1 if it remembers more than it sends, and sends the others in further calls: settings
--   have their stamp again only after the last one. Then name and value of each setting that it remembers.
-- Reply: {stamp, {name, value …} of the page, {name, value …} of those written again, the next page or '', 1 if
--   settings are lost}.
-- Reads: alive, buckets, depth, heads, held, job, lane, leased, limits, parked, ready, served, weights.
-- Writes: bell, buckets, config, depth, heads, lane, leased, limits, parked, ready, served, weights.
-- Bound: LIMITS.SETTINGS_PER_CALL settings that are sent, and a page of about LIMITS.SETTINGS_PER_CALL; as
--   `configure` if some were lost.

write_even_when_full()
local wrong = wrong_key(nil, WEIGHTS, TENANT_LIMITS)
if wrong then return wrong end
local page_kind, cursor = string.match(ARGV[2] or '', '^([wl])(%d+)$')
local is_first_page, HAS_MORE, FIRST = ARGV[2] == '', ARGV[3] == '1', 4
local is_sound = (is_first_page or page_kind) and #ARGV >= FIRST - 1 and #ARGV % 2 == 1
  and #ARGV < FIRST + 2 * LIMITS.SETTINGS_PER_CALL
if not is_sound then return wrong_arguments() end
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
local is_lost = known_began and not (known_began == began and known_number <= number)

local function gone_settings()
  local gone = {}
  for i = FIRST, is_lost and #ARGV or 0, 2 do
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

-- The first page has the settings of the queue. Weights follow, then limits.
local function page()
  local found, next_page = is_first_page and call('HGETALL', KEYS[1]) or {}, ''
  local function add(key, prefix, from)
    local part = call('HSCAN', key, from, 'COUNT', LIMITS.SETTINGS_PER_CALL)
    for i = 1, #part[2], 2 do found[#found + 1], found[#found + 2] = prefix .. part[2][i], part[2][i + 1] end
    return part[1]
  end
  if page_kind ~= 'l' then
    local rest = add(WEIGHTS, 'weight:', cursor or '0')
    if rest ~= '0' then return found, 'w' .. rest end
    cursor = '0'
  end
  local rest = add(TENANT_LIMITS, '', cursor)
  if rest ~= '0' then next_page = 'l' .. rest end
  return found, next_page
end

local function write_stamp()
  if known_began and (not began or known_began < began) then
    write_one('stamp', 'a' .. known_began .. ':0')
  elseif not began then
    write_one('stamp', new_stamp())
  end
end

local gone = gone_settings()
if is_first_page and not HAS_MORE then write_stamp() end
if #gone > 0 then write_settings(gone, HAS_MORE) end
finish()
local found, next_page = {}, ''
if not HAS_MORE then found, next_page = page() end
return { SETTINGS.stamp or '', found, gone, next_page, is_lost and 1 or 0 }
