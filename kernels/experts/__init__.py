"""A mixture of experts: each row is computed by the few feed-forwards that a router chooses for it (Shazeer, 2017).

Scores and shares are in float32. A row's sum over its experts has one order, that of their ranks, whatever the other
rows are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows
from sluice.kernels.experts.dense import Dense
from sluice.kernels.experts.routing import Router, Routing
from sluice.kernels.experts.stacked import Stacked, StackedExperts
from sluice.kernels.linear import Linear

__all__ = ["Dense", "Experts", "Mixture", "Router", "Routing", "SeparateExperts", "Stacked", "StackedExperts", "route"]


class Experts(Protocol):
    """The experts of one layer."""

    def __call__(self, x: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        """Compute `x` `[T, M]` by the chosen experts; add the output `[T, M]` of the shared one."""
        ...

    @property
    def products(self) -> Sequence[Linear]:
        """Those that are separate."""
        ...


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Experts with a product each."""

    each: Sequence[Dense]

    @property
    def products(self) -> list[Linear]:
        """All of each expert, in order."""
        return [product for expert in self.each for product in expert.products]

    def __call__(self, x: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        """Gather each expert's rows, compute them, and add them up by rank."""
        from sluice.kernels.experts.cpu import combine, grouped_rows

        rows, places = grouped_rows(x, routing.experts, self.each)
        return combine(rows, places, routing, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The feed-forward of a layer with experts."""

    router: Router
    experts: Experts
    shared: Dense | None = None
    """One that computes every row, with a gate of its own."""

    @property
    def products(self) -> list[Linear]:
        """Those that are separate, in the order of a step."""
        return [*([] if self.shared is None else self.shared.products), *self.experts.products]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute `x` `[T, M]` to `[T, M]`."""
        routing = route(x, self.router)
        return self.experts(x, routing, None if self.shared is None else self.shared(x))


def route(x: Tensor, router: Router) -> Routing:
    """Choose the experts of each row of `x` `[T, M]`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    check(x.dim() == 2 and x.shape[1] == router.weight.shape[1], "x must be [T, M], got {}", x.shape)
    check(x.dtype == router.weight.dtype, "the router must be {}, got {}", x.dtype, router.weight.dtype)
    check_rows("x", x)
    path = path_of("experts", x)
    if path is Path.TRITON:
        from sluice.kernels.experts.kernel import route_triton as choose
    elif path is Path.TORCH:
        from sluice.kernels.experts.cpu import route_torch as choose
    else:
        from sluice.kernels.experts.cpu import route_cpu as choose
    return choose(x, router)
