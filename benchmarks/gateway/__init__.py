"""The HTTP gateway: latency that it adds to a token, cost of a token and of an open stream."""
