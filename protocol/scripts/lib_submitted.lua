-- The event of a submitted job, as `submit` emits it first and `republish_events` again.

-- `payload` is the prompt, or nil if it has expired.
local function submitted_fields(job, payload)
  return {
    queue = QUEUE, priority = job.class, prompt_tokens = job.prompt, cost = job.cost, spec = job.spec, seed = job.seed,
    batch = job.batch, not_before_ms = job.not_before, deadline_ms = job.deadline, ttl_ms = job.ttl,
    digest = job.digest, custom_id = job.custom_id, line = job.line, endpoint = job.endpoint,
    key = SETTINGS.keep_prompts == 'full' and job.key or nil,
    prompt = SETTINGS.keep_prompts == 'full' and payload or nil,
    prompt_to_hash = SETTINGS.keep_prompts == 'hash' and payload or nil,
  }
end
