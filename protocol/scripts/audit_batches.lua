-- include: lib_counts
-- Count the jobs of batches for the audit.
--
-- KEYS: config.
-- ARGV[1]: packed array of batches.
-- Reply: for each {its total, jobs that have ended or are listed as open}.
-- Reads: batch, members.
-- Writes: nothing.
-- Bound: LIMITS.SLICE_JOBS batches.

local answers = {}
for i, batch in ipairs(rows_of(ARGV[1], LIMITS.SLICE_JOBS, 'string')) do
  local numbers = batch_numbers(batch)
  answers[i] = { numbers.total, numbers.ended + numbers.open }
end
return answers
