"""The page of the gateway at /ui: what operators and tenants see and change in a browser."""
