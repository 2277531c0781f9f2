-- include: lib_format_1
-- Move a slice of the events and callbacks that nobody has read yet in format 1. Their readers drop what they have
-- seen.
--
-- KEYS: config.
-- Reply: entries moved; fewer than a slice are the last.
-- Reads: outbox, 1:callbacks, 1:outbox.
-- Writes: callbacks, counters, garbage, outbox, 1:callbacks, 1:outbox.
-- Bound: LIMITS.SLICE_JOBS events and LIMITS.SLICE_JOBS callbacks.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local function first_of(name)
  local found = try('XRANGE', earlier.key(name), '-', '+', 'COUNT', LIMITS.SLICE_JOBS)
  return failed(found) and {} or found
end

local function delete(name, entries)
  local ids = {}
  for i, entry in ipairs(entries) do ids[i] = entry[1] end
  if #ids > 0 then try('XDEL', earlier.key(name), unpack(ids)) end
end

-- More fields than an entry of ours has could not be passed on.
local MAX_PARTS = 64

local events, callbacks = first_of('outbox'), first_of('callbacks')
for _, entry in ipairs(events) do
  local fields = entry[2]
  if fields[1] == 'e' and #fields == 2 then
    count('outbox_bytes', #fields[2])
    append_shared(OUTBOX, '*', 'e', fields[2])
  else
    to_garbage(earlier.key('outbox'), table.concat(fields, ' '))
  end
end
for _, entry in ipairs(callbacks) do
  if #entry[2] <= MAX_PARTS then
    call('XADD', CALLBACKS, '*', unpack(entry[2]))
  else
    to_garbage(earlier.key('callbacks'), entry[1])
  end
end
delete('outbox', events)
delete('callbacks', callbacks)
finish()
return math.max(#events, #callbacks)
