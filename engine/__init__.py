"""Continuous-batching engine: requests in, tokens out, one step at a time. Imports no Redis, SQL or wire format."""
