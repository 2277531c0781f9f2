"""The command `worker callbacks`: webhooks, exports and retention, run by rq."""
