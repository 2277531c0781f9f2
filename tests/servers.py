"""Real servers for tests: each starts its own binary in a folder of its own, and is stopped with the test."""
