-- Append tokens and ends to the channels of many choices. Each is checked before it is written.
--
-- KEYS: config.
-- ARGV[1]: incarnation. ARGV[2]: the progress of each choice, one behind the other, as `advance` in calls/progress.py
--   packs it (formats below). Whole numbers of fixed size need no further check; 0 and '' are absent values.
-- Reply: for each one text: 'ok', 'already', 'at <n>' (send again from n), 'replaced', 'retried' (requeued, as
--   the end requested), 'broken <reason>'; and 'ok <state>', 'already <state>' when the job is flagged.
-- Reads: batch, buckets, channel, dead, depth, heads, held, job, lane, leased, limits, outbox, parked, ready, result,
--   served, tenants, weights.
-- Writes: batch, bell, buckets, callbacks, channel, counters, dead, delayed, depth, garbage, heads, held, idem, job,
--   lane, leased, members, outbox, parked, payload, ready, result, served, tenants, timers.
-- Bound: LIMITS.MAX_UPDATES_PER_CALL choices, LIMITS.MAX_JOBS_PER_CALL of them with more than tokens.
--
-- The lease must name this incarnation and epoch, and `from` must be its offset (fencing). So a replaced worker cannot
-- write, and nothing is written twice. The stream's own check of ids, `<offset after it>-0`, is a second guard.

write_even_when_full()

local incarnation = ARGV[1]
if not is_text(incarnation, LIMITS.MAX_INCARNATION_BYTES) then return wrong_arguments() end

-- ---------------------------------------------------------------- leases: read in one command, written in one

local sent, held, changed = {}, {}, {}

local function read_leases()
  local ids = {}
  for i = 1, #sent do ids[i] = sent[i][1] end
  local packed = call('HMGET', held_key(incarnation), unpack(ids))
  for i = 1, #ids do
    local id = ids[i]
    if packed[i] and not held[id] then held[id] = unpack_lease(incarnation, packed[i]) end
  end
end

-- Offsets are written after all appends: no other script runs in between, and a crash keeps the whole call or nothing.
local function write_leases()
  local flat = {}
  for id, lease in pairs(changed) do
    flat[#flat + 1] = id
    flat[#flat + 1] = pack_lease(lease)
  end
  call_in_parts('HSET', held_key(incarnation), flat)
end

local function forget_lease(id) held[id], changed[id] = nil, nil end

-- ---------------------------------------------------------------- libraries that only some rows need, loaded on demand

local function later()
INCLUDE lib_time lib lib_lanes lib_places lib_finish
local function with_ends()
INCLUDE lib_ends lib_advance
end
return with_ends()
end

local loaded
local function end_library()
  loaded = loaded or later()
  return loaded
end

-- ---------------------------------------------------------------- arguments

-- Parts that follow (1: extras, 2: end, 3: both), job, epoch, choice, from, number of tokens, their entry.
local PROGRESS = '<BBc0I4BI4I4I4c0'
-- First scheduled, first token, prompt tokens + 1, longest gap of this attempt + 1, fingerprint, resolved options.
local EXTRAS = '<I6I6I6I6Bc0I4c0'
-- First letter of the state, 1 if it is rejected, reason, error, its code, result, record, output tokens, time to a
-- retry + 1, bytes of a result in parts + 1, the end's entry.
local END = '<c1BBc0I4c0Bc0I4c0I4c0I6I6I6I4c0'

local function read_sent(packed)
  local parts, id, epoch, choice, from, tokens, entry
  local at, num_with_more = 1, 0
  while at <= #packed do
    parts, id, epoch, choice, from, tokens, entry, at = struct.unpack(PROGRESS, packed, at)
    local row = { id, epoch, choice, from, tokens, entry, false, false }
    if parts > 0 then num_with_more = num_with_more + 1 end
    if #sent >= LIMITS.MAX_UPDATES_PER_CALL or num_with_more > LIMITS.MAX_JOBS_PER_CALL then return false end
    if parts > 3 or from + tokens > LIMITS.MAX_TOKENS then return false end
    if parts % 2 == 1 then row[7], at = end_library().extras_from(struct.unpack(EXTRAS, packed, at)) end
    if parts > 1 then row[8], at = end_library().end_from(struct.unpack(END, packed, at)) end
    if not at or tokens > 0 and entry == '' and not (row[8] and row[8].is_silent) then return false end
    sent[#sent + 1] = row
  end
  return true
end

if not read_sent(ARGV[2]) then return wrong_arguments() end

-- A choice that passes a mark may owe more than it was charged. An end settles the charge itself.
local function passes_mark(row)
  return not row[8] and row[4] % LIMITS.CHARGE_EVERY_TOKENS + row[5] >= LIMITS.CHARGE_EVERY_TOKENS
end

-- Tokens touch only channels and leases, whose types are checked when they are used. Ends and charges touch the keys of
-- the queue.
local function touches_the_queue()
  for i = 1, #sent do
    if sent[i][8] or passes_mark(sent[i]) then return true end
  end
  return false
end

local wrong = touches_the_queue() and end_library().wrong_key(incarnation)
if wrong then return wrong end

-- ---------------------------------------------------------------- one choice

local function without_lease(id, epoch)
  local job = end_library().load_job(id)
  return job and job.ended_by == incarnation .. ':' .. epoch and 'already' or 'replaced'
end

local function append(id, choice, to, entry)
  local _, suffix = names_of(id)
  return try('XADD', channel_of(suffix, choice), text_of(to) .. '-0', 'e', entry)
end

-- The channel has more tokens up to `to` than the lease says, because a call failed between the two writes. The channel
-- is right. Returns whether the owner can continue from there.
local function catch_up(id, lease, choice, to)
  local _, suffix = names_of(id)
  local last = try('XREVRANGE', channel_of(suffix, choice), '+', '-', 'COUNT', '1')
  local offset = not failed(last) and last[1] and tonumber(string.match(last[1][1], '^(%d+)%-0$'))
  if not offset or offset <= lease[2 * choice + 1] or offset > to then return false end
  lease[2 * choice + 1] = offset
  changed[id] = lease
  return true
end

local function stop_word(word, lease)
  return lease.flag ~= '' and word .. ' ' .. lease.flag or word
end

-- Compare the offset of the choice with that of the tokens sent; nil if they are the next ones.
local function out_of_line(lease, at, from, tokens, has_end)
  local offset = lease[at]
  if lease[at + 1] ~= 0 then return stop_word('already', lease) end
  if from == offset then return nil end
  if from + tokens <= offset and not has_end then return stop_word('already', lease) end
  return 'at ' .. offset
end

local function advance(row)
  local id, epoch, choice, from, tokens = row[1], row[2], row[3], row[4], row[5]
  local lease = held[id]
  if not lease then return without_lease(id, epoch) end
  local at = 2 * choice + 1
  if lease.epoch ~= epoch or not lease[at] then return 'replaced' end
  local elsewhere = out_of_line(lease, at, from, tokens, row[8])
  if elsewhere then return elsewhere end

  local library, job, why = (row[7] or row[8]) and end_library(), nil, nil
  if library then
    job, why = library.load_running(id)
    if not job then return library.broken(id, nil, lease, 'job row: ' .. why) end
  end
  if row[8] and not library.has_all_parts(job, row[8].result_bytes) then return 'at ' .. lease[at] end
  if tokens > 0 then
    local added = row[6] ~= '' and append(id, choice, from + tokens, row[6])
    if failed(added) then
      if catch_up(id, lease, choice, from + tokens) then return 'at ' .. lease[at] end
      library = end_library()
      return library.broken(id, library.load_running(id), lease, 'channel ' .. choice .. ': ' .. added.err)
    end
    lease[at] = from + tokens
    changed[id] = lease
    if lease.deaths == 1 then end_library().clear_deaths(id, lease) end
    if passes_mark(row) then end_library().charge_further(job or end_library().load_job(id), lease) end
  end
  if row[7] then library.note_extras(job, row[7], lease, tokens) end
  local word = stop_word('ok', lease)
  return row[8] and library.end_choice(job, lease, choice, row[8]) or word
end

-- The rows of jobs whose ends or first tokens are sent.
local function read_jobs()
  local ids = {}
  for i = 1, #sent do
    if (sent[i][7] or sent[i][8]) and held[sent[i][1]] then ids[#ids + 1] = sent[i][1] end
  end
  if #ids > 0 then end_library().load_jobs(ids) end
end

local answers = {}
if #sent > 0 then
  read_leases()
  read_jobs()
end
for i = 1, #sent do answers[i] = advance(sent[i]) end
write_leases()
if loaded then loaded.finish() end
return answers
