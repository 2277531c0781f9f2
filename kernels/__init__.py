"""Tensor operations, each with a reference, a Triton kernel and a CPU path. Knows no engine, no sequence, no queue.

Imports nothing: transformers probes for a package of this name and reads its version.
"""

__version__ = "0"
