"""The gateway's log on stderr, with one line for each request."""
