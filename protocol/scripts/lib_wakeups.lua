-- Wake the next idle worker. A notification reaches one worker that listens (docs/decisions/wake-one-worker.md); its
-- pull acknowledges it, and if that leaves jobs, another worker is woken.

-- The names used outside: a script may have 200 locals, and `pull` is near that limit.
local wake_next, is_stream_id

do

function is_stream_id(text) return string.find(text or '', '^%d+%-%d+$') end

-- Whether jobs wait for a worker: on a lane, among the suspects, or with a dead worker.
local function is_work_left()
  local keys = { SUSPECTS, PREFIX .. 'heads:' .. RETURNED }
  for class = 0, LIMITS.MAX_PRIORITY do keys[#keys + 1] = PREFIX .. 'heads:' .. class end
  return call('EXISTS', unpack(keys)) > 0 or call('ZCOUNT', ALIVE, '-inf', beat_time()) > 0
end

local function has_run_out() return #taken > 0 and (has_more or is_over or not has_room()) end

-- Acknowledge the notification that woke this worker, and write another if jobs are left: a new one if the slice or the
-- room is full, or if this pull has made jobs ready. Otherwise the jobs do not suit this worker, and it passes on the one
-- that woke it. A chain of these ends at a worker that has pulled since its first.
function wake_next(has_readied)
  if request.woken_by then try('XACK', NOTIFICATIONS, 'workers', request.woken_by) end
  if SETTINGS.paused == '1' or not is_work_left() then return end
  if has_readied or has_run_out() then
    write_notification('1')
  elseif request.woken_by then
    write_notification(request.chain)
  end
end

end
