"""The protocol between producers, gateways and workers: messages, keys, states, limits, calls and their scripts."""
