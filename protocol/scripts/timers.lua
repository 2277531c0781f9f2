-- include: lib_timers
-- Fire one slice of due timers, as pull and beat do; for a queue without workers. Before that, end those of some jobs
-- whose own time has passed.
--
-- KEYS: config, then the fixed keys of the queue. ARGV: packed array of job ids.
-- Reply: {how many fired, when the next is due or false}.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

if not ARGV[1] then return wrong_arguments() end
local overdue = rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')

local num_fired = fire_timers(overdue)
finish()
return { num_fired, next_timer() or false }
