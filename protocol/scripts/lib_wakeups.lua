-- Wake the next idle worker. A notification reaches one worker that listens (docs/decisions/wake-one-worker.md); its
-- pull acknowledges it, and if that leaves jobs, another worker is woken.

local wake_next  -- the name used outside

do

local function has_run_out() return #taken > 0 and (has_more or is_over or not has_room()) end

-- Acknowledge the notification that woke this worker, and write another if jobs are left: a new one if the slice or the
-- room is full. Otherwise the jobs do not suit this worker, and it passes on the one that woke it. A chain of these
-- ends at a worker that has pulled since its first.
function wake_next()
  if request.woken_by then try('XACK', NOTIFICATIONS, 'workers', request.woken_by) end
  if IS_PAUSED or not waits_anything() then return end
  if has_run_out() then
    write_notification('1')
  elseif request.woken_by then
    write_notification(request.chain)
  end
end

end
