"""Compute steps on a device: layout, forward pass, CUDA graphs, sampling, memory and device errors."""
