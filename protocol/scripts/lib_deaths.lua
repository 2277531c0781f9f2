-- Suspects: jobs that may have killed their workers, and when such a job fails.
--
-- `deaths` of a job lists the deaths of its owners (without deregistration, or reported as broken) since it last made
-- progress: `<incarnation>,<mates>,<1 if apart>,<number>;` each, numbered among all deaths in this partition. After one
-- death, the job runs as before. From the second on, it runs only in isolation. Two deaths in isolation and alone end
-- it, unless as many workers died without it in between; then it runs again, up to a limit.

-- The names used outside: a script may have 200 locals, and `pull` is near that limit.
local deaths_of, has_died_apart, take_back_death, about_death, is_settled_by_death

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

local function write_deaths(job, deaths)
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

local function list_death(job, lease, death)
  local deaths = deaths_of(job)
  deaths[#deaths + 1] = death
  write_deaths(job, deaths)
  lease.deaths = 1
  return deaths
end

local function num_alone(deaths)
  local alone = 0
  for _, death in ipairs(deaths) do
    if death.is_apart and death.mates == 0 then alone = alone + 1 end
  end
  return alone
end

-- Deaths of workers without the job, between the first and the last death with it.
local function num_elsewhere(deaths) return deaths[#deaths].number - deaths[1].number + 1 - #deaths end

-- Whether the job is the cause: its deaths alone outnumber the deaths without it, or reach the limit.
local function is_poison(deaths)
  local alone = num_alone(deaths)
  return alone >= 2 and (alone > num_elsewhere(deaths) or alone >= LIMITS.MAX_DEATHS_ALONE)
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

-- ---------------------------------------------------------------- one death

-- A damaged counter restarts: it must not abort a pull that has moved jobs.
local function next_number()
  local number = try('HINCRBY', COUNTERS, 'worker_deaths', 1)
  if not failed(number) then return number end
  call('HSET', COUNTERS, 'worker_deaths', 1)
  return 1
end

function about_death(incarnation)
  local key = worker_key(incarnation)
  local num_held = call('HLEN', held_key(incarnation)) + (tonumber(call('HGET', key, 'stopped') or '') or 0)
  -- Mates and number are recorded when the death is first seen: later, jobs have moved and other workers have died.
  if call('HSETNX', key, 'mates', math.max(0, num_held - 1)) == 1 and call('HEXISTS', key, 'farewell') == 0 then
    call('HSET', key, 'death', next_number())
  end
  call('PEXPIRE', key, LIMITS.WORKER_KEPT_S * 1000)
  local about = call('HMGET', key, 'mates', 'apart', 'farewell', 'death', 'beaten')
  return {
    incarnation = incarnation, mates = tonumber(about[1]) or 0, is_apart = about[2] == '1',
    is_deregistered = about[3] == '1', number = tonumber(about[4] or '') or 0,
    seen = about[3] ~= '1' and whole(about[5], LIMITS.MAX_NUMBER) or nil,
  }
end

-- Deaths since the job last made progress, with this one, which is recorded once.
local function deaths_with(job, lease, death)
  local deaths = deaths_of(job)
  for _, one in ipairs(deaths) do
    if one.incarnation == death.incarnation then return deaths end
  end
  deaths = list_death(job, lease, death)
  leases.write(job, lease)
  return deaths
end

-- Record the death; return whether it moved the job to the dead set or to the suspects.
function is_settled_by_death(job, lease, death)
  if death.is_deregistered then return false end
  local deaths = deaths_with(job, lease, death)
  if is_poison(deaths) then
    end_job(job, lease, {
      state = 'failed', error_code = 'killed_its_worker',
      error = string.format('%d worker processes died while they ran this job alone.', num_alone(deaths)),
    })
    return true
  end
  if #deaths < 2 then return false end
  return_job(job, lease, 'suspect')
  return true
end

end
