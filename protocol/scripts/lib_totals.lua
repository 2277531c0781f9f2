-- The counters as a flat map of known fields, because users may have added any number of other fields.
local function read_counters()
  local names, flat = {
    'submitted', 'done', 'failed', 'cancelled', 'expired', 'requeued', 'waiting_jobs', 'waiting_tokens',
    'waiting_bytes', 'running_jobs', 'worker_deaths', 'results_missed', 'outbox_bytes',
  }, {}
  for i, value in ipairs(call('HMGET', COUNTERS, unpack(names))) do
    if value then flat[#flat + 1], flat[#flat + 2] = names[i], value end
  end
  return flat
end
