"""The client's connections to the queue's server."""
