"""Commands of `producer` that belong to the gateway: serve, keys and prices."""
