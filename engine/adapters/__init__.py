"""Low-rank adapters of a model: their folders, their weights, and those that are loaded."""
