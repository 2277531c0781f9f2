"""Correctness on a GPU."""
