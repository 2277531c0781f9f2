-- base only
-- Count the XREADs that this server has answered. Only readers of channels send them, so a worker detects whether there
-- are any.
--
-- KEYS: config. No arguments.
-- Reply: the count, of all clients and queues; false if the server does not report it.
-- Reads: nothing.
-- Writes: nothing.
-- Bound: one command.

local known = try('INFO', 'commandstats')
if failed(known) then return false end
return tonumber(string.match(known, 'cmdstat_xread:calls=(%d+)') or 0)
