-- The base of every script, and all that an advance of tokens needs.
--
-- KEYS[1] is always `<prefix>:config`. The other fixed keys are declared by the caller; lane and job keys are derived
-- from values that a script reads, and are in the same slot.
--
-- Each function of a script is created at each call, which costs half a microsecond. Libraries that only some calls
-- need are included inside a function (`later` in advance.lua) and created when it is called.

local call, try = redis.call, redis.pcall
local PREFIX = string.sub(KEYS[1], 1, -7)

local LEASES = PREFIX .. 'leases'

-- ---------------------------------------------------------------- the call

-- At maxmemory, Redis refuses the first growing write of a script, but accepts all writes after one of any kind. Only
-- submit may be refused: every other script begins with this write, which changes nothing.
local function write_even_when_full()
  call('DEL', PREFIX .. 'nothing')
end

-- Unpack an argument: an array of at most `most` values of one type, or of rows that begin with these types. Scripts do so
-- before their first write, since a later error would leave the script half done.
local function rows_of(packed, most, ...)
  local rows, kinds = cmsgpack.unpack(packed), { ... }
  local function check(value, kind)
    if type(value) ~= kind then error('an argument holds a ' .. type(value) .. ' where a ' .. kind .. ' must be') end
  end
  check(rows, 'table')
  if #rows > most then error(string.format('an argument has %d rows, and at most %d are taken', #rows, most)) end
  for _, row in ipairs(rows) do
    if #kinds > 1 then check(row, 'table') end
    for i, kind in ipairs(kinds) do check(#kinds > 1 and row[i] or #kinds == 1 and row or nil, kind) end
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

-- `<tenant>`, `<tenant>:<random>` of a job id; nil if it is not a job id. Cached for the call.
local tenants, suffixes = {}, {}
local function names_of(id)
  if not suffixes[id] then
    local tenant, random = string.match(id, '^%d+%.([a-z0-9_-]+)%.([A-Za-z0-9_-]+)$')
    if not tenant then return nil end
    tenants[id], suffixes[id] = tenant, tenant .. ':' .. random
  end
  return tenants[id], suffixes[id]
end

-- A lease is an array: owner ('' when returned), epoch, flag ('' or the requested state), previous owner, 1 if the
-- job has recorded deaths, then for each choice its offset and whether it ended: 0 no, 1 yes, 2 well (`done`).
local OWNER, EPOCH, FLAG, PREVIOUS, DEATHS, FIRST = 1, 2, 3, 4, 5, 6
