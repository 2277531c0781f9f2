"""Bounds on incoming requests: arrival time, headers, encodings, connections, and memory of bodies."""
