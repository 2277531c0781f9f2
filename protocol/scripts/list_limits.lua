-- include: lib_settings
-- List the limits of tenants and what is left of them, a page at a time.
--
-- KEYS: config. ARGV: cursor, 0 to begin.
-- Reply: {cursor of the next page or 0, {tenant, most running jobs, tokens a minute, running jobs, tokens left, time
--   until it may start a job} …}. Each number is false if the tenant has no such limit; the time is false if it may
--   start one now, and -1 if one of its jobs must end first. A tenant may be on two pages.
-- Reads: buckets, leased, limits.
-- Writes: nothing.
-- Bound: a page of about LIMITS.LIMITS_PER_PAGE limits.

if not is_text(ARGV[1], 20) or string.find(ARGV[1], '%D') then return wrong_arguments() end
local page = limits and try('HSCAN', TENANT_LIMITS, ARGV[1], 'COUNT', LIMITS.LIMITS_PER_PAGE)
if not page or failed(page) then return { '0', {} } end

local listed, is_listed = {}, {}
for i = 1, #page[2], 2 do
  local _, tenant = limited_by(page[2][i])
  if tenant and not is_listed[tenant] then
    is_listed[tenant] = true
    listed[#listed + 1] = limits.facts_of(tenant)
  end
end
return { page[1], listed }
