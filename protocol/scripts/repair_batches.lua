-- include: lib_counts lib_batches
-- Set the total of batches to the jobs that have ended or are listed as open; complete those without open jobs.
--
-- KEYS: config.
-- ARGV[1]: packed array of batches.
-- Reply: for each 1, or 0 if its total was right.
-- Reads: batch, members.
-- Writes: batch, callbacks, timers.
-- Bound: LIMITS.SLICE_JOBS batches.

write_even_when_full()
local wrong = wrong_key()
if wrong then return wrong end

local function repair(batch)
  local numbers = batch_numbers(batch)
  if numbers.total == numbers.ended + numbers.open then return 0 end
  for _, state in ipairs(ENDS) do call('HSET', batch_key(batch), state, numbers[state]) end
  call('HSET', batch_key(batch), 'total', numbers.ended + numbers.open)
  complete_batch(batch, as_map(read_batch(batch)))
  return 1
end

local answers = {}
for i, batch in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do answers[i] = repair(batch) end
finish()
return answers
