"""The matrix product as torch makes it: for CUDA (cuBLAS), and where packing does not pay."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it


class Linear(Protocol):
    """A prepared matrix product."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[T, K]` to `[T, N]`."""
        ...


class PlainLinear:
    """`torch.nn.functional.linear` over the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[T, K]` to `[T, N]`."""
        return F.linear(x, self._weight, self._bias)
