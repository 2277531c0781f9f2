"""The command line of the client: `producer`."""
