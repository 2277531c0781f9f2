-- include: lib_deaths
-- Return jobs to the stream, where they go on at their next token; with a farewell the incarnation is over. Of a worker
-- that broke it is a death all the same: what breaks one after the other must be found.
--
-- KEYS: config, then the fixed keys of the queue.
-- ARGV: incarnation, 1 for farewell, packed array of {job, epoch}, 1 if it broke.
-- Reply: for each 1 (returned, or ended as it had been asked) or 0 (not this incarnation's any more).

write_even_when_full()
local wrong = wrong_key(ARGV[1])
if wrong then return wrong end

local me, is_farewell, has_broken = ARGV[1], ARGV[2] == '1', ARGV[4] == '1'
local death = has_broken and about_death(me)

local function give_back(id, epoch)
  local lease = read_lease(id)
  if not lease or lease[OWNER] ~= me or lease[EPOCH] ~= epoch then return 0 end
  local job = load_job(id)
  if not job or job.state ~= 'running' then return 0 end
  if lease[FLAG] ~= '' then
    end_unheard(job, lease, lease[FLAG], SAID[lease[FLAG]])
  elseif not (death and is_settled_by_death(job, lease, death)) then
    return_job(job, lease, death and 'death' or 'given_back')
  end
  return 1
end

-- What it still holds is free for others at once, and no further death is listed for it. That it said farewell is kept: a pull
-- or a beat of it may still be on its way, and must not bring it back.
local function say_farewell()
  if call('GET', ISOLATOR) == me then call('DEL', ISOLATOR) end
  if call('EXISTS', held_key(me)) == 0 then
    call('ZREM', ALIVE, me)
    call('DEL', worker_key(me))
  else
    call('ZADD', ALIVE, NOW - 1, me)
    ring()
  end
  call('HSET', worker_key(me), 'farewell', 1)
  call('PEXPIRE', worker_key(me), LIMITS.WORKER_KEPT_S * 1000)
end

local answers = {}
for i, row in ipairs(cmsgpack.unpack(ARGV[3])) do answers[i] = give_back(row[1], row[2]) end
if is_farewell then say_farewell() end
finish()
return answers
