-- The death of a worker: what it says of a job that the worker held, and when the job fails for it.

local about_death, is_settled_by_death  -- the names used outside

do

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
  if #deaths < LIMITS.SUSPECT_DEATHS then return false end
  return_job(job, lease, 'suspect')
  return true
end

end
