"""torch's matrix product: for CUDA (cuBLAS), and where packing does not pay."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.gated_activation import Activation, gated_activation


class Linear(Protocol):
    """A prepared matrix product."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        ...


class PlainLinear:
    """`torch.nn.functional.linear` over the unchanged weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        return F.linear(x, self._weight, self._bias)


class GatedLinear:
    """A product whose first half of columns gates the second."""

    def __init__(self, product: Linear, activation: Activation) -> None:
        self.product = product
        self.activation: Activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, I]`."""
        return gated_activation(self.product(x), activation=self.activation)
