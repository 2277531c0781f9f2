-- A batch as a flat map. Each field is asked for alone, since users that submit have no HMGET for batches.
local function read_batch(batch)
  local flat = {}
  for _, name in ipairs(BATCH_FIELDS) do
    local value = call('HGET', batch_key(batch), name)
    if value then flat[#flat + 1], flat[#flat + 2] = name, value end
  end
  return flat
end
