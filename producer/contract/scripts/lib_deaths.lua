-- Suspects: which jobs may have killed their workers, and when one is given up.
--
-- `deaths` of a job lists the deaths of its owners, without farewell or of a worker that broke, since it last made
-- progress: `<incarnation>,<mates>,<1 if
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

-- ---------------------------------------------------------------- one death

local function about_death(incarnation)
  local key = worker_key(incarnation)
  local num_held = call('HLEN', held_key(incarnation))
  -- Mates are counted once, when the death is first seen: later some have been moved.
  call('HSETNX', key, 'mates', math.max(0, num_held - 1))
  call('PEXPIRE', key, LIMITS.WORKER_KEPT_S * 1000)
  local about = call('HMGET', key, 'mates', 'apart', 'farewell', 'life')
  return {
    incarnation = incarnation, mates = tonumber(about[1]) or 0, is_apart = about[2] == '1',
    is_farewell = about[3] == '1', life = tonumber(about[4] or '') or LIMITS.LIFE_S * 1000,
  }
end

-- Deaths since the job last made progress, with this one, which is listed once however often the job is looked at.
local function deaths_with(job, lease, death)
  local deaths = deaths_of(job)
  for _, one in ipairs(deaths) do
    if one.incarnation == death.incarnation then return deaths end
  end
  deaths = list_death(job, lease, { incarnation = death.incarnation, mates = death.mates, is_apart = death.is_apart })
  write_lease(job.id, lease)
  return deaths
end

-- List the death, and say whether it settles where the job goes: to the dead set, or among the suspects.
local function is_settled_by_death(job, lease, death)
  if death.is_farewell then return false end
  local deaths = deaths_with(job, lease, death)
  if num_alone(deaths) >= 2 then
    end_job(job, lease, {
      state = 'failed', error_code = 'killed_its_worker',
      error = 'The worker process died twice while it ran this job alone.',
    })
    return true
  end
  if #deaths < 2 then return false end
  return_job(job, lease, 'suspect')
  return true
end
