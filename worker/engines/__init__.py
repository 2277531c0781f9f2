"""The engines that a worker can run, by name."""
