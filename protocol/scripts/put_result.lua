-- Write one part of a large result to its key, fenced by the lease. The end then states the total length.
--
-- KEYS: config.
-- ARGV: incarnation, job, epoch, offset, bytes.
-- Reply: 'ok', 'replaced', 'too_large', or 'missing': parts are written in order, and the one before is not there.
-- Reads: held, result.
-- Writes: result.
-- Bound: one part of a result of LIMITS.MAX_RESULT_BYTES bytes.

write_even_when_full()
if not is_text(ARGV[1], LIMITS.MAX_INCARNATION_BYTES) then return wrong_arguments() end
local wrong = wrong_key(ARGV[1])
if wrong then return wrong end

local me, id, epoch, offset, part = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
if not epoch or not whole(offset, LIMITS.MAX_NUMBER) or not part then return wrong_arguments() end
local tenant, suffix = names_of(id)
local packed = tenant and try('HGET', held_key(me), id)
local lease = type(packed) == 'string' and unpack_lease(me, packed)
if not lease or lease.epoch ~= epoch then return 'replaced' end
if offset + #part > LIMITS.MAX_RESULT_BYTES then return 'too_large' end
local key = result_key({ suffix = suffix })
if offset == 0 then
  call('SET', key, part)
else
  -- Beyond its end, Redis would fill a gap with zeros, and the length would not show it.
  if try('STRLEN', key) ~= offset then return 'missing' end
  call('APPEND', key, part)
end
return 'ok'
