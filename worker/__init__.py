"""The daemon: drains a queue into its own engine and publishes tokens as they are generated."""
