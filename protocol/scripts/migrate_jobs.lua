-- include: lib_format_1 lib_migration
-- Move jobs of format 1 that are named, in any state; of running ones those whose owner has ended.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV[1]: packed array of job ids.
-- Reply: for each what `move_job` returns, or 'again': not looked at, since the jobs before it have many choices.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local answers = {}
for i, id in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do
  answers[i] = slice.is_spent() and 'again' or move_job(id)
end
finish()
earlier.finish()
return answers
