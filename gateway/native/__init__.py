"""Routes for what OpenAI's API lacks: jobs, their events, queues and tenants."""
