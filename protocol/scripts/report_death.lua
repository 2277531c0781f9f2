-- include: lib_models
-- Report that the process of an incarnation has ended: its heartbeat expires now, and no later one renews it. Its jobs
-- are reclaimed by the next pull of another worker, which counts the death.
--
-- KEYS: config. ARGV: incarnation.
-- Reply: 1, or 0 if it is not registered: it deregistered, never began, or all its jobs have been reclaimed.
-- Reads: alive, clock, worker.
-- Writes: alive, bell, serving, worker.
-- Bound: one worker, with LIMITS.MAX_ADAPTERS adapters.

write_even_when_full()
if not is_text(ARGV[1], LIMITS.MAX_INCARNATION_BYTES) then return wrong_arguments() end
local wrong = wrong_key(ARGV[1])
if wrong then return wrong end

local dead = ARGV[1]
local expiry = tonumber(call('ZSCORE', ALIVE, dead) or '')
if not expiry then return 0 end
local now = beat_time()
if expiry > now then call('ZADD', ALIVE, now, dead) end
leave_model(dead)
call('HSET', worker_key(dead), 'reported', 1)
call('PEXPIRE', worker_key(dead), LIMITS.WORKER_KEPT_S * 1000)
notify()
finish()
return 1
