-- The base of every script, and all that an advance of tokens needs.
--
-- KEYS[1] is always `<prefix>:config`, and the only key that a caller declares: the server parses and copies each one,
-- which cost a tenth of an empty pull. The others are derived, and are in the same slot.
--
-- Each function of a script is created at each call, which costs half a microsecond. Libraries that only some calls
-- need are included inside a function (`later` in advance.lua) and created when it is called.

local call, try = redis.call, redis.pcall
local PREFIX = string.sub(KEYS[1], 1, -7)
local limits  -- of tenants (lib_limits.lua); nil if the queue has none

-- ---------------------------------------------------------------- the call

-- At maxmemory, Redis refuses the first growing write of a script, but accepts all writes after one of any kind. Only
-- submit may be refused: every other script begins with this write, which changes nothing.
local function write_even_when_full()
  call('DEL', PREFIX .. 'nothing')
end

-- Unpack an argument: an array of at most `most` values of one type, or of rows that begin with these types. Scripts do
-- so before their first write, since a later error would leave the script half done.
local function rows_of(packed, most, ...)
  local rows, kinds = cmsgpack.unpack(packed), { ... }
  local function check(value, kind)
    if type(value) ~= kind then error('an argument holds a ' .. type(value) .. ' where a ' .. kind .. ' must be') end
  end
  check(rows, 'table')
  if #rows > most then error(string.format('an argument has %d rows, and at most %d are taken', #rows, most)) end
  for i = 1, #rows do
    local row = rows[i]
    if #kinds == 1 then
      check(row, kinds[1])
    else
      check(row, 'table')
      for k = 1, #kinds do
        if type(row[k]) ~= kinds[k] then check(row[k], kinds[k]) end
      end
    end
  end
  return rows
end

-- Whether an argument is a text of 1 to `most` bytes; whether it is empty or a text of at most `most`.
local function is_text(value, most) return type(value) == 'string' and #value > 0 and #value <= most end
local function is_optional(value, most) return value == '' or is_text(value, most) end
local function wrong_arguments() return redis.error_reply('ERR wrong arguments') end

-- A command with any number of values: Lua passes at most about 8,000 at once. Pairs stay together.
local function call_in_parts(command, key, values)
  for from = 1, #values, 1000 do call(command, key, unpack(values, from, math.min(from + 999, #values))) end
end

local function failed(reply) return type(reply) == 'table' and reply.err or nil end

-- Redis stores a hash of few short fields as a list and scans it for each field. A long field converts it to a hash
-- table, which it stays until it is empty or the server restarts. The first HDEL tells whether the caller may delete;
-- without that right, which a submitter lacks, the hash stays a list.
local MANY, LONG_FIELD = 16, string.rep('-', 65)
local function hash_for_many(key)
  if failed(try('HDEL', key, LONG_FIELD)) then return end
  call('HSET', key, LONG_FIELD, '')
  call('HDEL', key, LONG_FIELD)
end

-- Lua formats a number at each command that it is passed to, which costs as much as the command. So numbers that are
-- used often are texts.
local whole_texts = {}
local function text_of(number)
  whole_texts[number] = whole_texts[number] or string.format('%d', number)
  return whole_texts[number]
end

local function channel_of(suffix, choice) return PREFIX .. 'channel:' .. suffix .. ':' .. text_of(choice) end

-- `<tenant>`, `<tenant>:<random>` of a job id; nil if it is not one of this partition. Cached for the call.
local PARTITION = string.match(PREFIX, ':(%d+)}:')
local JOB_ID = '^' .. PARTITION .. '%.([%l%d_-]+)%.([%w_-]+)$'
local tenants, suffixes = {}, {}
local function names_of(id)
  if not suffixes[id] then
    local tenant, random = string.match(id, JOB_ID)
    if not tenant then return nil end
    tenants[id], suffixes[id] = tenant, tenant .. ':' .. random
  end
  return tenants[id], suffixes[id]
end

-- ---------------------------------------------------------------- leases

-- What `held:<incarnation>` says of a job is its lease: epoch, number of the pull that leased it and place among its
-- jobs, flag ('' or the requested state), mark of that pull, 1 if deaths of its owners are recorded, then for each
-- choice its offset and whether it ended: 0 no, 1 yes, 2 well (`done`). In Lua it also has the owner, '' of a job that
-- nobody runs; of choice c (from 0) the offset is at 2c + 1, and the end at 2c + 2.
local pack_lease, unpack_lease

do

local LETTERS, WORDS = { [''] = ' ', cancelled = 'c', expired = 'e' }, { [' '] = '', c = 'cancelled', e = 'expired' }
local HEAD, HEAD_BYTES, CHOICE, CHOICE_BYTES = '<I4I6Bc1c1B', 14, 'I4B', 5
-- By the number of choices.
local FORMATS = { HEAD .. CHOICE }
local function format_of(choices)
  FORMATS[choices] = FORMATS[choices] or HEAD .. string.rep(CHOICE, choices)
  return FORMATS[choices]
end

function pack_lease(lease)
  return struct.pack(format_of(#lease / 2), lease.epoch, lease.number, lease.place,
    LETTERS[lease.flag], lease.mark, lease.deaths, unpack(lease))
end

local function lease_from(owner, choices, epoch, number, place, letter, mark, deaths, ...)
  if not WORDS[letter] then return nil end
  local lease = {
    owner = owner, epoch = epoch, number = number, place = place, flag = WORDS[letter], mark = mark, deaths = deaths,
    ...
  }
  -- The position behind the last value.
  lease[2 * choices + 1] = nil
  return lease
end

-- The lease of an owner from what is stored; nil if another program wrote it.
function unpack_lease(owner, packed)
  local choices = (#packed - HEAD_BYTES) / CHOICE_BYTES
  if choices < 1 or choices > LIMITS.MAX_CHOICES or choices % 1 ~= 0 then return nil end
  return lease_from(owner, choices, struct.unpack(format_of(choices), packed))
end

end

local function held_key(incarnation) return PREFIX .. 'held:' .. incarnation end
