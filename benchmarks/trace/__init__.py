"""Traces of a whole worker."""
