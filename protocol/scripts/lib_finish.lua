-- The final writes of every script.

local deleted = {}  -- keys that `finish` deletes
local count_batches  -- set by the library of ends

-- The channels that this call has closed. A slice of jobs ends early when their choices are many.
local slice = { num_channels = 0 }
function slice.is_spent() return slice.num_channels >= LIMITS.SLICE_CHANNELS end

-- `chain`: '1', or the id of the notification that no worker has acted on.
local function write_notification(chain)
  append_shared(NOTIFICATIONS, 'MAXLEN', '~', LIMITS.BELL_MAXLEN, '*', 'e', chain)
end

local function finish()
  rows.write()
  if #deleted > 0 then call('DEL', unpack(deleted)) end
  if limits then limits.write() end
  -- Before the lanes, whose scores depend on it.
  write_served()
  if count_batches then count_batches() end
  write_lanes()
  write_waiting()
  local packed = #events > 0 and cmsgpack.pack(events)
  -- The recorder subtracts it when it deletes the entry.
  if packed then count('outbox_bytes', #packed) end
  for name, by in pairs(counted) do
    -- Another user may have written a value that is not a number: it is reset, and the audit recounts.
    if by ~= 0 and failed(try('HINCRBY', COUNTERS, name, by)) then call('HSET', COUNTERS, name, math.max(0, by)) end
  end
  if packed then append_shared(OUTBOX, '*', 'e', packed) end
  if has_notification then write_notification('1') end
end
