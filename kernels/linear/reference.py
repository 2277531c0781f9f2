"""Definition of a linear layer: the product in float64, rounded once."""

from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` `[T, K]` by `weight` `[N, K]` transposed, plus `bias` `[N]`."""
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)
