"""How long steps take, as measured while the engine runs, and how many prompt tokens a step has time for."""
