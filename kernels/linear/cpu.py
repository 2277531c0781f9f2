"""Matrix products on the CPU: oneDNN's prepacked weights where they are faster than torch's own call."""

from torch import Tensor

from kernels.linear.plain import Linear, PlainLinear


def pack_linear_cpu(weight: Tensor, bias: Tensor | None) -> Linear:
    """Prepare one product."""
    return PlainLinear(weight, bias)
