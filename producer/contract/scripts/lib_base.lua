-- What every script begins with, and all that an advance of tokens needs.
--
-- KEYS[1] is always `<prefix>:config`. The other fixed keys are declared by the caller; lane and job keys are derived
-- from what a script reads, and lie in the same slot.
--
-- Every function that a script defines is made anew at each call, and costs half a microsecond: what only some calls
-- need is included inside a function (`later` in advance.lua), and made when that is called.

local call, try = redis.call, redis.pcall
local PREFIX = string.sub(KEYS[1], 1, -7)

local LEASES = PREFIX .. 'leases'

-- ---------------------------------------------------------------- the call

-- At maxmemory Redis refuses the first growing write of a script, and lets all pass after one write of any kind. Only
-- submit may be refused: every other script begins with this one, which does nothing.
local function write_even_when_full()
  call('DEL', PREFIX .. 'nothing')
end

local function failed(reply) return type(reply) == 'table' and reply.err or nil end

-- `<tenant>`, `<tenant>:<random>` of a job id; nil when it is none. Asked several times for a job, so kept for a call.
local tenants, suffixes = {}, {}
local function names_of(id)
  if not suffixes[id] then
    local tenant, random = string.match(id, '^%d+%.([a-z0-9_-]+)%.([A-Za-z0-9_-]+)$')
    if not tenant then return nil end
    tenants[id], suffixes[id] = tenant, tenant .. ':' .. random
  end
  return tenants[id], suffixes[id]
end

-- A lease is an array: owner ('' when given back), epoch, flag ('' or the state asked for), the owner before, 1 if
-- the job has deaths listed, then for each choice its offset and whether it ended: 0 no, 1 yes, 2 well (`done`).
local OWNER, EPOCH, FLAG, PREVIOUS, DEATHS, FIRST = 1, 2, 3, 4, 5, 6
