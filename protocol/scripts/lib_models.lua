-- Record which models living workers serve.

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

-- When a worker leaves, or its process has ended.
local function leave_model(incarnation)
  local model = call('HGET', worker_key(incarnation), 'model')
  if model then try('ZREM', SERVING .. model, incarnation) end
end
