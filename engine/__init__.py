"""The continuous-batching engine: requests in, tokens out, one step at a time. Knows no Redis, no SQL, no wire."""
