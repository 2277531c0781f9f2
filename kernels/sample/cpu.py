"""Sampling on the CPU."""

from torch import Tensor

from kernels.sample import SampleOptions
from kernels.sample.reference import sample_reference


def sample_cpu(logits: Tensor, options: SampleOptions, *, out: Tensor) -> None:
    """Write one token per row of `logits` `[S, V]` to `out` `[S]`."""
    out.copy_(sample_reference(logits, options))
