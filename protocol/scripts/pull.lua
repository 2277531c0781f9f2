-- include: lib_time
-- Lease the first jobs that fit, in one step: returned jobs, then those of the class and lane whose turn it is.
--
-- KEYS: config.
-- ARGV: incarnation, number, kv tokens, prefill tokens, sequences, cache tokens, is empty, holds one oversized
--   (booleans as 0 and 1), reserve tokens, fingerprints of the only models whose jobs it continues or '', how long
--   jobs of another one are set aside, id of the notification that woke it or '', the first of its chain, '' or the
--   class over which jobs must be: a full worker takes them in the place of what it runs.
-- Reply: {number, {id, row, prompt, lease, id, row …}, last id of the notification stream, has more, is paused, drain,
--   now, when a job that was left to other workers may be taken or false, when `maintain` is due or false}.
-- Reads: alive, batch, bell, buckets, clock, dead, delayed, depth, heads, held, isolator, job, lane, leased, limits,
--   offers, outbox, parents, parked, payload, ready, served, serving, suspects, tenants, timers, weights, worker.
-- Writes: alive, batch, bell, buckets, callbacks, channel, counters, dead, delayed, depth, garbage, heads, held, idem,
--   isolator, job, lane, leased, members, outbox, parked, payload, ready, result, served, suspects, tenants, timers,
--   worker.
-- Bound: LIMITS.PULL_JOBS jobs; LIMITS.MAX_LANES_LISTED lanes of each class are read, jobs taken from
--   LIMITS.MAX_LANES_PER_PULL of them and LIMITS.MAX_SKIPPED_PER_PULL more examined; all leases of the worker if its
--   number is repeated.
--
-- A pull is numbered: a repeated number gets the same jobs again, so a lost reply loses nothing; a lower number is a
-- late duplicate and gets nothing.

write_even_when_full()

local function optional(text) return text ~= '' and text or nil end
local request = {
  incarnation = ARGV[1], number = tonumber(ARGV[2]), kv = tonumber(ARGV[3]), prefill = tonumber(ARGV[4]),
  sequences = tonumber(ARGV[5]), cache = tonumber(ARGV[6]), is_empty = ARGV[7] == '1', holds = ARGV[8] == '1',
  reserve = tonumber(ARGV[9]), own_model = optional(ARGV[10]), model_wait_ms = tonumber(ARGV[11]),
  woken_by = optional(ARGV[12]), chain = ARGV[13], over = tonumber(ARGV[14] or ''),
}
local ME, MINE = request.incarnation, PREFIX .. 'worker:' .. (ARGV[1] or '')

-- A number of room may be negative: nothing fits then.
local function has_wrong_arguments()
  for _, name in ipairs({ 'number', 'kv', 'prefill', 'sequences', 'cache', 'reserve' }) do
    local number = request[name]
    if not number or number ~= number then return true end
  end
  if request.sequences % 1 ~= 0 then return true end
  if not whole(request.model_wait_ms, LIMITS.MAX_NUMBER) then return true end
  if request.woken_by then
    local is_id = string.find(request.woken_by, '^%d+%-%d+$') and string.find(request.chain or '', '^%d+%-%d+$')
    if not is_id then return true end
  end
  if ARGV[14] ~= '' and not whole(request.over, LIMITS.MAX_PRIORITY) then return true end
  -- It is stored with a NUL behind it.
  return not is_text(ME, LIMITS.MAX_INCARNATION_BYTES) or string.find(ME, '%z')
end
if has_wrong_arguments() then return wrong_arguments() end

local IS_PAUSED, NOW_BEATING = SETTINGS.paused == '1', beat_time()
local taken, has_more = {}, false

-- Now, if the heartbeat of another worker has expired; else when one does, or the next timer is due.
local function when_maintenance_is_due()
  local beating = call('ZRANGE', ALIVE, '0', '1', 'WITHSCORES')
  local expiry = time_in(beating[beating[1] == ME and 4 or 2])
  if expiry and expiry <= NOW_BEATING then return NOW end
  return earlier(next_timer(), expiry and NOW + math.max(expiry - NOW_BEATING, LIMITS.LOOK_AGAIN_MS))
end

local function reply(must_drain)
  local last_notification = call('XREVRANGE', NOTIFICATIONS, '+', '-', 'COUNT', '1')[1]
  return {
    request.number, taken, last_notification and last_notification[1] or '0-0', has_more and 1 or 0,
    IS_PAUSED and 1 or 0, must_drain and 1 or 0, NOW, request.look_at or false, when_maintenance_is_due() or false,
  }
end

-- ---------------------------------------------------------------- what most pulls of an idle worker find

local HEADS = { heads_key(RETURNED) }
for class = 0, LIMITS.MAX_PRIORITY do HEADS[class + 2] = heads_key(class) end
-- In how many classes lanes wait, that of returned jobs included.
local function num_waiting_classes() return call('EXISTS', unpack(HEADS)) end
local function has_suspects() return call('EXISTS', SUSPECTS, PREFIX .. 'isolator') > 0 end
local function waits_anything() return num_waiting_classes() > 0 or has_suspects() end

-- Nothing waits, and this number was not used before. A worker without its fields is a new one, or one whose heartbeat
-- has expired: it must be registered, or turned away.
local function finds_nothing()
  local last = tonumber(call('HGET', MINE, 'pull') or '') or 0
  return request.number > last and not waits_anything() and call('ZSCORE', ALIVE, ME)
    and not call('HGET', MINE, 'apart')
end

if finds_nothing() then
  if request.woken_by then try('XACK', NOTIFICATIONS, 'workers', request.woken_by) end
  return reply(false)
end

-- ---------------------------------------------------------------- taking jobs

local function take_jobs()
INCLUDE lib lib_lanes lib_places lib_finish
-- Most pulls end no job and meet no suspect: these functions are created when they are needed.
local function load_ends()
INCLUDE lib_ends
  return { end_job = end_job, end_without_worker = end_without_worker, reasons = END_REASONS }
end
INCLUDE lib_offers lib_taking lib_wakeups
local function load_order()
INCLUDE lib_classes lib_order
  return take_from_lanes
end
local function load_suspects()
INCLUDE lib_deaths lib_suspects
  return isolate
end

local wrong = wrong_key(ME)
if wrong then return wrong end

local function resend_reply()
  for _, held in ipairs(leases.all_of(ME)) do
    local id, lease = held[1], held[2]
    if lease.number == request.number then
      local job = load_running(id)
      local payload = job and read_payload(job)
      if payload and job.owner == ME then add_leased(job, lease, payload) end
    end
  end
  has_more = true
end

-- Register a new incarnation. One whose heartbeat has expired gets no jobs until it beats again, even if all its jobs
-- were moved and it left `alive`: its fields are kept for longer.
local function is_registered()
  local expiry = call('ZSCORE', ALIVE, ME)
  if expiry then return tonumber(expiry) > NOW_BEATING end
  if call('EXISTS', MINE) == 1 then return false end
  call('ZADD', ALIVE, NOW_BEATING + LIMITS.HEARTBEAT_LIFETIME_S * 1000, ME)
  return true
end

local function remember()
  if #new_leases == 0 then return end
  call('HSET', held_key(ME), unpack(new_leases))
  -- An advance reads hundreds of them.
  hash_for_many(held_key(ME))
  call('HSET', MINE, 'pull', request.number)
  call('PEXPIRE', MINE, LIMITS.WORKER_KEPT_S * 1000)
end

local function take_what_fits()
  local num_held = call('HLEN', held_key(ME))
  local is_apart = call('HGET', MINE, 'apart') == '1'
  if is_apart and num_held > 0 then return false end
  if is_apart then call('HDEL', MINE, 'apart') end
  local must_drain = has_suspects() and load_suspects()(num_held == 0)
  if not must_drain and not is_over and not request.holds and has_room() then load_order()() end
  return must_drain
end

local function pull()
  if IS_PAUSED then return false end
  local last = tonumber(call('HGET', MINE, 'pull') or '') or 0
  if request.number == last then
    resend_reply()
    return false
  end
  if request.number < last or not is_registered() then return false end
  return take_what_fits()
end

local must_drain = pull()
remember()
finish()
wake_next()
return reply(must_drain)
end

return take_jobs()
