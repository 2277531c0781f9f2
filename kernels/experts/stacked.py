"""Experts whose weights are one tensor, as a GPU has them: multiplied together, or one after another by torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.chain import Path, path_of
from sluice.kernels.experts.dense import Dense
from sluice.kernels.experts.routing import Routing
from sluice.kernels.gated_activation import Activation
from sluice.kernels.linear import Linear
from sluice.kernels.linear.int8 import dequantized, quantized
from sluice.kernels.linear.plain import GatedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """A matrix of each expert."""

    weight: Tensor
    """`[E, N, K]`, contiguous; int8 with scales."""

    scales: Tensor | None
    """`[E, N]` float32."""

    bias: Tensor | None
    """`[E, N]`."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, is_int8: bool) -> "Stacked":
        """Take a weight `[E, N, K]` as it is, or round it to int8."""
        if not is_int8:
            return cls(weight=weight, scales=None, bias=bias)
        narrow, scales = quantized(weight.flatten(0, 1))
        return cls(weight=narrow.view(weight.shape), scales=scales.view(weight.shape[:2]), bias=bias)

    def of_expert(self, expert: int) -> Linear:
        """Return the product of one expert, by torch."""

        def multiply(x: Tensor) -> Tensor:
            weight = self.weight[expert]
            wide = weight if self.scales is None else dequantized(weight, self.scales[expert], x.dtype)
            return F.linear(x, wide, None if self.bias is None else self.bias[expert])

        return multiply


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """Experts in two tensors."""

    gate_up: Stacked
    """`[E, 2 * I, M]`: the gate, then the up projection."""

    down: Stacked
    """`[E, M, I]`."""

    activation: Activation

    @property
    def products(self) -> Sequence[Linear]:
        """None are separate."""
        return []

    @property
    def each(self) -> list[Dense]:
        """The experts one by one, by torch."""
        return [
            Dense(GatedLinear(self.gate_up.of_expert(e), self.activation), self.down.of_expert(e))
            for e in range(self.gate_up.weight.shape[0])
        ]

    def __call__(self, x: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        """Compute `x` `[T, M]` by the chosen experts; add the output `[T, M]` of the shared one."""
        path = path_of("experts", x)
        if path is Path.TRITON:
            from sluice.kernels.experts.kernel import experts_triton as compute
        elif path is Path.TORCH:
            from sluice.kernels.experts.cpu import experts_torch as compute
        else:
            from sluice.kernels.experts.cpu import experts_cpu as compute
        return compute(x, routing, shared, experts=self)
