-- Suspects: which jobs may have killed their workers, and when one is given up.
--
-- `deaths` of a job lists the deaths without farewell since it last made progress: `<incarnation>,<mates>,<1 if
-- apart>;` each. The first isolates nobody. From the second on the job runs only apart; two deaths apart and quite
-- alone end it: a job that only happened to be alone when its worker was killed is no more guilty than others.

local function deaths_of(job)
  local deaths = {}
  for incarnation, mates, apart in string.gmatch(job.deaths or '', '([^,;]+),(%d+),([01]);') do
    deaths[#deaths + 1] = { incarnation = incarnation, mates = tonumber(mates), is_apart = apart == '1' }
  end
  return deaths
end

local function write_deaths(job, deaths)
  local parts = {}
  for i, death in ipairs(deaths) do
    parts[i] = string.format('%s,%d,%d;', death.incarnation, death.mates, death.is_apart and 1 or 0)
  end
  job.deaths = table.concat(parts)
  call('HSET', job.hash, 'deaths', job.deaths)
end

local function has_died_apart(job)
  for _, death in ipairs(deaths_of(job)) do
    if death.is_apart then return true end
  end
  return false
end

local function list_death(job, lease, death)
  local deaths = deaths_of(job)
  deaths[#deaths + 1] = death
  write_deaths(job, deaths)
  lease[DEATHS] = 1
  return deaths
end

local function num_alone(deaths)
  local alone = 0
  for _, death in ipairs(deaths) do
    if death.is_apart and death.mates == 0 then alone = alone + 1 end
  end
  return alone
end

-- An owner that returns was only slow: its death is taken off the jobs that it lost.
local function take_back_death(job, incarnation)
  local kept = {}
  for _, death in ipairs(deaths_of(job)) do
    if death.incarnation ~= incarnation then kept[#kept + 1] = death end
  end
  write_deaths(job, kept)
  return kept
end
