-- include: lib_timers lib_deaths lib_taking lib_order lib_reclaim lib_suspects
-- Take the first jobs that fit, leased, in one step: of the dead, of those returned, of the class and lane whose turn
-- it is.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: incarnation, number, kv tokens, prefill tokens, sequences, cache tokens, is empty, holds one oversized, may
--   reclaim, reserve tokens, until when it may reclaim or '' (truths as 0 and 1).
-- Reply: {number, {job …}, last id of the bell, has more, is paused, drain, now, when to ask again or false}; a job is
--   an array in the order of `told`.
--
-- A pull is numbered: a number that was answered before gets the same jobs again, so a lost reply loses nothing; a
-- lower one is a late double and gets nothing.

write_even_when_full()
local wrong = wrong_key(ME)
if wrong then return wrong end

local function tell_again()
  local flat = call('HGETALL', held_key(ME))
  for i = 1, #flat, 2 do
    local id = flat[i]
    local number, mark = string.match(flat[i + 1], '^(%d+)(%a?)$')
    if tonumber(number) == request.number then
      local lease, job = read_lease(id), load_job(id)
      local payload = job and read_payload(job)
      if lease and payload and lease[OWNER] == ME then taken[#taken + 1] = told(job, lease, payload, mark) end
    end
  end
  has_more = true
end

-- An incarnation that was never seen begins to live; one whose life is over takes nothing until it beats again, even
-- when all it held was moved and it left `alive`: what it said of itself is kept for longer.
local function lives()
  local expiry = call('ZSCORE', ALIVE, ME)
  if expiry then return tonumber(expiry) > NOW end
  if call('EXISTS', MINE) == 1 then return false end
  call('ZADD', ALIVE, NOW + LIMITS.LIFE_S * 1000, ME)
  return true
end

-- Redis keeps a hash of few short fields as a list, and looks through it for each that is asked for: an advance asks for
-- hundreds. A long field makes a table of it, which it stays until it is empty or the server starts again.
local function write_new_leases()
  local long_field = string.rep('-', 65)
  new_leases[#new_leases + 1], new_leases[#new_leases + 2] = long_field, ''
  call('HSET', LEASES, unpack(new_leases))
  call('HDEL', LEASES, long_field)
end

local function remember()
  if #new_leases == 0 then return end
  write_new_leases()
  call('HSET', held_key(ME), unpack(new_held))
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
    tell_again()
    return false
  end
  if request.number < last or not lives() then return false end
  return take_what_fits()
end

-- When the next timer is due, or the next life of another runs out unless it is renewed: whoever is idle then asks at
-- that very moment. A life that is over is not waited for: its jobs are here, or do not fit.
local function look_again()
  local at = next_timer()
  local lives = call('ZRANGEBYSCORE', ALIVE, '(' .. NOW_TEXT, '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
  local i = lives[1] == ME and 3 or 1
  local expiry = tonumber(lives[i + 1] or '')
  return expiry and math.min(at or expiry, expiry) or at
end

local must_drain = pull()
remember()
finish()
local bell = call('XREVRANGE', BELL, '+', '-', 'COUNT', 1)[1]
return {
  request.number, taken, bell and bell[1] or '0-0', has_more and 1 or 0, SETTINGS.paused == '1' and 1 or 0,
  must_drain and 1 or 0, NOW, look_again() or false,
}
