"""The contract of producer and worker: messages, keys, states, limits, scripts, calls and tables."""
