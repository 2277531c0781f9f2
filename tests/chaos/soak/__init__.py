"""Producers, workers, recorders and a nemesis, all real processes; `tests.chaos.checker` checks the result."""
