"""Inputs for kernels and the search for their configurations."""
