-- include: lib_timers
-- Fire one slice of due timers, as pull and beat do; for a queue without workers.
--
-- KEYS: config, then the fixed keys of the queue.
-- Reply: {how many fired, when the next is due or false}.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local num_fired = fire_timers()
finish()
return { num_fired, next_timer() or false }
