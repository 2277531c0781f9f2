"""The daemon: runs the jobs of a queue in its engine and publishes tokens as they are generated."""
