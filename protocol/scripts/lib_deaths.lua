-- Suspects: jobs that may have killed their workers.
--
-- `deaths` of a job lists the deaths of its owners (without deregistration, or reported as broken) since it last made
-- progress: `<incarnation>,<mates>,<1 if apart>,<number>;` each, numbered among all deaths in this partition. After one
-- death, the job runs as before. From the second on, it runs only in isolation. Two deaths in isolation and alone end
-- it, unless as many workers died without it in between; then it runs again, up to a limit.

local deaths_of, write_deaths, has_died_apart, take_back_death  -- the names used outside

do

function deaths_of(job)
  local deaths = {}
  for incarnation, mates, apart, number in string.gmatch(job.deaths or '', '([^,;]+),(%d+),([01]),(%d+);') do
    deaths[#deaths + 1] = {
      incarnation = incarnation, mates = tonumber(mates), is_apart = apart == '1', number = tonumber(number),
    }
  end
  return deaths
end

function write_deaths(job, deaths)
  local parts = {}
  for i, death in ipairs(deaths) do
    parts[i] = string.format('%s,%d,%d,%d;', death.incarnation, death.mates, death.is_apart and 1 or 0, death.number)
  end
  job.deaths = #parts > 0 and table.concat(parts) or nil
  save(job)
end

function has_died_apart(job)
  for _, death in ipairs(deaths_of(job)) do
    if death.is_apart then return true end
  end
  return false
end

-- An owner that returns was only slow: remove its death from the jobs that it lost.
function take_back_death(job, incarnation)
  local kept = {}
  for _, death in ipairs(deaths_of(job)) do
    if death.incarnation ~= incarnation then kept[#kept + 1] = death end
  end
  write_deaths(job, kept)
  return kept
end

end
