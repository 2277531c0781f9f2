"""The HTTP gateway: what it adds to a token's way, what a token and an open stream cost it."""
