-- Which models living workers serve. For each model, its workers by the expiry of their heartbeats: so whether one serves
-- it costs the same however many live.

local serving = {}  -- one name: a script may have 200 locals, and `pull` is near that limit

do

-- Model -> the last expiry among its workers: to list the models.
local MODELS = PREFIX .. 'models'
local function workers_key(model) return PREFIX .. 'serving:' .. model end

-- A key of another program in the place of one of these.
local function replace_foreign(key)
  if not is_type(key, 'zset') then call('DEL', key) end
end

-- With each heartbeat, which expires at `expiry`.
function serving.note(incarnation, model, now, expiry)
  if not is_text(model, LIMITS.MAX_MODEL_BYTES) then return end
  local key = workers_key(model)
  replace_foreign(key)
  call('ZADD', key, expiry, incarnation)
  call('ZREMRANGEBYSCORE', key, '-inf', now)
  call('PEXPIRE', key, LIMITS.WORKER_KEPT_S * 1000)
  replace_foreign(MODELS)
  call('ZADD', MODELS, 'GT', expiry, model)
  call('ZREMRANGEBYSCORE', MODELS, '-inf', now)
  call('PEXPIRE', MODELS, LIMITS.WORKER_KEPT_S * 1000)
end

-- When a worker leaves, or its process has ended.
function serving.leave(incarnation)
  local model = call('HGET', worker_key(incarnation), 'model')
  if model then try('ZREM', workers_key(model), incarnation) end
end

-- A model whose key is foreign counts as served: the next heartbeat of a worker with it replaces that key.
local known = {}
function serving.has(model)
  if known[model] == nil then
    local num_workers = try('ZCOUNT', workers_key(model), '(' .. beat_time(), '+inf')
    known[model] = failed(num_workers) or num_workers > 0
  end
  return known[model]
end

function serving.models()
  local listed, living = try('ZRANGEBYSCORE', MODELS, '(' .. beat_time(), '+inf'), {}
  for _, model in ipairs(failed(listed) and {} or listed) do
    if serving.has(model) then living[#living + 1] = model end
  end
  return living
end

end
