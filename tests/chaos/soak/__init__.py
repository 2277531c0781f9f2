"""Producers, workers, recorders and a nemesis, all real processes; then the books are read by `tests.chaos.checker`."""
