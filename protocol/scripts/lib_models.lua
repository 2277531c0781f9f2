-- Record which models living workers serve, and what their engines offer.

-- Model -> the last expiry among its workers: to list the models.
local MODELS = PREFIX .. 'models'

-- Returns whether the member is new. A key of another program is replaced.
local function add_to(key, ...)
  local added = try('ZADD', key, ...)
  if failed(added) then
    call('DEL', key)
    added = call('ZADD', key, ...)
  end
  return added == 1
end

-- With each heartbeat, which expires at `expiry`. Those that have expired are removed when one is added.
local function note_model(incarnation, model, now, expiry)
  if not is_text(model, LIMITS.MAX_MODEL_BYTES) then return end
  local key = SERVING .. model
  if add_to(key, expiry, incarnation) then call('ZREMRANGEBYSCORE', key, '-inf', now) end
  call('PEXPIRE', key, LIMITS.WORKER_KEPT_S * 1000)
  if add_to(MODELS, 'GT', expiry, model) then call('ZREMRANGEBYSCORE', MODELS, '-inf', now) end
end

-- The features that a queue takes at submit are those that at least one living worker offers.
local function write_features()
  local features, is_known = {}, {}
  for _, member in ipairs(call('ZRANGE', OFFERS, 0, LIMITS.MAX_OFFERS - 1)) do
    local listed = string.match(member, '^[^\n]*; features=([%w_,-]*)')
    for feature in string.gmatch(listed or '', '[^,]+') do
      if not is_known[feature] then features[#features + 1] = feature end
      is_known[feature] = true
    end
  end
  SETTINGS.features = table.concat(features, ',')
  call('HSET', KEYS[1], 'features', SETTINGS.features)
end

-- With each heartbeat, as `note_model`. The stamp of the settings stays: workers do not remember this one.
local function note_offer(model, offer, now, expiry)
  if not is_text(model, LIMITS.MAX_MODEL_BYTES) or not is_text(offer, LIMITS.MAX_OFFER_BYTES) then return end
  local is_new = add_to(OFFERS, 'GT', expiry, string.gsub(offer, '\n', ' ') .. '\n' .. model)
  if call('ZREMRANGEBYSCORE', OFFERS, '-inf', now) > 0 or is_new then write_features() end
end

-- The adapters that a worker names: each is served as a model is. At most `MAX_ADAPTERS` are read.
local function adapters_of(text)
  local names = {}
  for name in string.gmatch(text or '', '%S+') do
    if #names < LIMITS.MAX_ADAPTERS and is_text(name, LIMITS.MAX_MODEL_BYTES) then names[#names + 1] = name end
  end
  return names
end

-- With each heartbeat, as `note_model`.
local function note_adapters(incarnation, adapters, model, now, expiry)
  if not is_text(model, LIMITS.MAX_MODEL_BYTES) then return end
  for _, name in ipairs(adapters_of(adapters)) do
    note_model(incarnation, name, now, expiry)
    if add_to(PARENTS, 'GT', expiry, name .. '\n' .. model) then call('ZREMRANGEBYSCORE', PARENTS, '-inf', now) end
  end
end

-- When a worker leaves, or its process has ended.
local function leave_model(incarnation)
  local found = call('HMGET', worker_key(incarnation), 'model', 'adapters')
  if found[1] then try('ZREM', SERVING .. found[1], incarnation) end
  for _, name in ipairs(adapters_of(found[2])) do try('ZREM', SERVING .. name, incarnation) end
end
