"""Definition of a mixture of experts: float32 inside, or float64 for rows in float64.

A row's output is the sum of its experts' outputs, each rounded to the dtype, times their shares, in the order of their
ranks, then that of the shared expert: rounded once. So it does not depend on the other rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sluice.kernels.experts.routing import Router, Routing


def route_reference(x: Tensor, router: Router) -> Routing:
    """Choose the experts of rows `x` `[T, M]` by a router's scores."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scores = x.to(wide) @ router.weight.to(wide).T  # [T, E + has_shared]
    shared = scores[:, -1].sigmoid() if router.has_shared else None
    scores = scores[:, : router.num_experts]
    if router.bias is not None:
        scores = scores + router.bias.to(wide)
    ordered, experts = scores.sort(dim=1, descending=True, stable=True)
    best = ordered[:, : router.num_chosen]
    shares = (best if router.is_normalised else ordered).softmax(dim=1)[:, : router.num_chosen]
    return Routing(experts[:, : router.num_chosen].int(), shares, shared)


def mixture_reference(
    x: Tensor,
    router: Router,
    experts: Sequence[Callable[[Tensor], Tensor]],
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute rows `x` `[T, M]`, one by one, by the experts that the router chooses, and a shared one."""
    routing = route_reference(x, router)
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        row, total = x[t : t + 1], torch.zeros(x.shape[1], dtype=routing.shares.dtype)
        for expert, share in zip(routing.experts[t].tolist(), routing.shares[t], strict=True):
            total += share * experts[expert](row)[0].to(total.dtype)
        if shared is not None and routing.shared is not None:
            total += routing.shared[t] * shared(row)[0].to(total.dtype)
        out[t] = total.to(x.dtype)
    return out
