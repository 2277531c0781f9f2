"""`worker tune`: find settings for a machine, a model and its traffic."""
