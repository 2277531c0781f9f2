"""Generate without a queue: the engine in the caller's own process and thread. Knows no Redis and no SQL."""
