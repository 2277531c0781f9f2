-- include: lib_timers lib_deaths lib_offers lib_taking lib_classes lib_order lib_reclaim lib_suspects lib_wakeups
-- Lease the first jobs that fit, in one step: jobs of dead workers, then returned ones, then those of the class and
-- lane whose turn it is.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: incarnation, number, kv tokens, prefill tokens, sequences, cache tokens, is empty, holds one oversized, may
--   reclaim, reserve tokens, until when it may reclaim or '', fingerprints of the only models whose jobs it continues or '', how
--   long jobs of another one are set aside (booleans as 0 and 1), id of the notification that woke it or '', the first of
--   its chain, '' or the class over which jobs must be: a full worker takes them in the place of what it runs.
-- Reply: {number, {id, row, prompt, lease, id, row …}, last id of the notification stream, has more, is paused, drain, now, when to pull again or
--   false}.
--
-- A pull is numbered: a repeated number gets the same jobs again, so a lost reply loses nothing; a lower number is a
-- late duplicate and gets nothing.

write_even_when_full()
-- A number of room may be negative: nothing fits then.
local function has_wrong_arguments()
  for _, i in ipairs({ 2, 3, 4, 5, 6, 10 }) do
    local number = tonumber(ARGV[i] or '')
    if not number or number ~= number then return true end
  end
  for _, i in ipairs({ 11, 13 }) do
    if (ARGV[i] or '') ~= '' and not whole(ARGV[i], LIMITS.MAX_NUMBER) then return true end
  end
  if request.woken_by and not (is_stream_id(request.woken_by) and is_stream_id(request.chain)) then return true end
  if (ARGV[16] or '') ~= '' and not request.over then return true end
  -- It is stored with a NUL behind it.
  return not is_text(ME, LIMITS.MAX_INCARNATION_BYTES) or string.find(ME, '%z')
end
if has_wrong_arguments() then return wrong_arguments() end
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
  if expiry then return tonumber(expiry) > beat_time() end
  if call('EXISTS', MINE) == 1 then return false end
  call('ZADD', ALIVE, beat_time() + LIMITS.HEARTBEAT_LIFETIME_S * 1000, ME)
  return true
end

-- Redis stores a hash of few short fields as a list and scans it for each field; an advance reads hundreds. A long
-- field converts it to a hash table, which it stays until it is empty or the server restarts.
local function remember()
  if #new_leases == 0 then return end
  local long_field = string.rep('-', 65)
  new_leases[#new_leases + 1], new_leases[#new_leases + 2] = long_field, ''
  call('HSET', held_key(ME), unpack(new_leases))
  call('HDEL', held_key(ME), long_field)
  call('HSET', MINE, 'pull', request.number)
  call('PEXPIRE', MINE, LIMITS.WORKER_KEPT_S * 1000)
end

local function take_what_fits()
  local num_held = call('HLEN', held_key(ME))
  local is_apart = call('HGET', MINE, 'apart') == '1'
  if is_apart and num_held > 0 then return false end
  if is_apart then call('HDEL', MINE, 'apart') end
  local must_drain = isolate(num_held == 0)
  if must_drain or is_over then return must_drain end
  if request.holds or not has_room() then return false end
  reclaim()
  take_from_lanes()
  return false
end

local function pull()
  fire_timers()
  if SETTINGS.paused == '1' then return false end
  local last = tonumber(call('HGET', MINE, 'pull') or '') or 0
  if request.number == last then
    resend_reply()
    return false
  end
  if request.number < last or not is_registered() then return false end
  return take_what_fits()
end

-- When the next timer is due or the next heartbeat of another worker expires: an idle worker pulls again then. Expired
-- heartbeats do not count: their jobs were reclaimed by this pull, or do not fit. A full worker pulls again when the
-- first job that it left to idle ones has waited long enough.
local function look_again()
  if request.over then return request.look_at end
  local at, now = next_timer(), beat_time()
  local beating = call('ZRANGEBYSCORE', ALIVE, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
  local i = beating[1] == ME and 3 or 1
  local expiry = tonumber(beating[i + 1] or '')
  -- The clock of heartbeats may stand still until the next one.
  expiry = expiry and NOW + math.max(expiry - now, LIMITS.LOOK_AGAIN_MS)
  return expiry and math.min(at or expiry, expiry) or at
end

local must_drain = pull()
remember()
local has_readied = has_notification
has_notification = false
finish()
wake_next(has_readied)
local last_notification = call('XREVRANGE', NOTIFICATIONS, '+', '-', 'COUNT', 1)[1]
return {
  request.number, taken, last_notification and last_notification[1] or '0-0', has_more and 1 or 0,
  SETTINGS.paused == '1' and 1 or 0, must_drain and 1 or 0, NOW, look_again() or false,
}
