"""API keys of the gateway: each belongs to one tenant. The database stores only their hashes."""
