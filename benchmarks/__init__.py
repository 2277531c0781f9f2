"""Benchmarks behind every figure in the documentation: `python -m benchmarks NAME`."""
