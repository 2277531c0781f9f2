"""Comparison of batching disciplines."""
