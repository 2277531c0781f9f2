-- Suspects: which jobs may have killed their workers, and when one is given up.
--
-- `deaths` of a job lists the deaths of its owners, without farewell or of a worker that broke, since it last made
-- progress: `<incarnation>,<mates>,<1 if apart>,<number>;` each, numbered among all deaths in this partition. The first
-- isolates nobody. From the second on the job runs only apart; two deaths apart and quite alone end it: a job that only
-- happened to be alone when its worker was killed is no more guilty than others. Where workers die without it as often,
-- those two say nothing, and it runs again, up to a bound.

-- What is known outside; a script may have 200 locals, and `pull` is near that.
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
  job.deaths = table.concat(parts)
  call('HSET', job.hash, 'deaths', job.deaths)
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

-- Deaths of workers that did not have the job, from the first of those that had it to the last.
local function num_elsewhere(deaths) return deaths[#deaths].number - deaths[1].number + 1 - #deaths end

-- Whether it is the job: its own deaths alone outnumber all those that happened without it, or are very many.
local function is_guilty(deaths)
  local alone = num_alone(deaths)
  return alone >= 2 and (alone > num_elsewhere(deaths) or alone >= LIMITS.MAX_DEATHS_ALONE)
end

-- An owner that returns was only slow: its death is taken off the jobs that it lost.
function take_back_death(job, incarnation)
  local kept = {}
  for _, death in ipairs(deaths_of(job)) do
    if death.incarnation ~= incarnation then kept[#kept + 1] = death end
  end
  write_deaths(job, kept)
  return kept
end

-- ---------------------------------------------------------------- one death

-- A counter that somebody damaged begins anew: this must not end a pull that has moved jobs.
local function next_number()
  local number = try('HINCRBY', COUNTERS, 'worker_deaths', 1)
  if not failed(number) then return number end
  call('HSET', COUNTERS, 'worker_deaths', 1)
  return 1
end

function about_death(incarnation)
  local key = worker_key(incarnation)
  local num_held = call('HLEN', held_key(incarnation))
  -- Mates and number are those when the death is first seen: later some have been moved, and others have died.
  if call('HSETNX', key, 'mates', math.max(0, num_held - 1)) == 1 and call('HEXISTS', key, 'farewell') == 0 then
    call('HSET', key, 'death', next_number())
  end
  call('PEXPIRE', key, LIMITS.WORKER_KEPT_S * 1000)
  local about = call('HMGET', key, 'mates', 'apart', 'farewell', 'death')
  return {
    incarnation = incarnation, mates = tonumber(about[1]) or 0, is_apart = about[2] == '1',
    is_farewell = about[3] == '1', number = tonumber(about[4] or '') or 0,
  }
end

-- Deaths since the job last made progress, with this one, which is listed once however often the job is looked at.
local function deaths_with(job, lease, death)
  local deaths = deaths_of(job)
  for _, one in ipairs(deaths) do
    if one.incarnation == death.incarnation then return deaths end
  end
  deaths = list_death(job, lease, death)
  write_lease(job.id, lease)
  return deaths
end

-- List the death, and say whether it settles where the job goes: to the dead set, or among the suspects.
function is_settled_by_death(job, lease, death)
  if death.is_farewell then return false end
  local deaths = deaths_with(job, lease, death)
  if is_guilty(deaths) then
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
