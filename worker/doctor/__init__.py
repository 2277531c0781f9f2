"""The command `worker doctor`: checks everything that a worker depends on."""
