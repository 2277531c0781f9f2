"""Recorded steps: CUDA graphs by size, and their inputs."""
