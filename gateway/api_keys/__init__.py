"""API keys of the gateway: each lets its bearer act in the name of one tenant. The database keeps only their hashes."""
