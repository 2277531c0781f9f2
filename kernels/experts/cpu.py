"""Experts on the CPU: choosing and adding up by native.c, or by torch's operators, which work on any device.

The products are the experts' own, one expert after another.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.experts.dense import Dense
from sluice.kernels.experts.routing import Router, Routing
from sluice.kernels.native import native_function

if TYPE_CHECKING:
    from sluice.kernels.experts.stacked import StackedExperts

ROUTE = ("sluice_route", "iplpplllliippp")
COMBINE = ("sluice_combine", "iplppplplll")


def route_cpu(x: Tensor, router: Router) -> Routing:
    """Choose the experts of each row of `x` `[T, M]`."""
    dtype, native = DTYPE_CODES.get(x.dtype), native_function(*ROUTE)
    if dtype is None or native is None:
        return route_torch(x, router)
    num_rows, num_experts = x.shape[0], router.num_experts
    scores = torch.empty(num_rows, router.weight.shape[0], dtype=torch.float32)
    experts = torch.empty(num_rows, router.num_chosen, dtype=torch.int32)
    shares = torch.empty(num_rows, router.num_chosen + router.has_shared, dtype=torch.float32)
    native(
        dtype,
        x.data_ptr(),
        x.stride(0),
        router.weight.data_ptr(),
        None if router.bias is None else router.bias.data_ptr(),
        num_rows,
        x.shape[1],
        num_experts,
        router.num_chosen,
        router.has_shared,
        router.is_normalised,
        scores.data_ptr(),
        experts.data_ptr(),
        shares.data_ptr(),
    )
    return Routing(experts, shares[:, : router.num_chosen], shares[:, -1] if router.has_shared else None)


def route_torch(x: Tensor, router: Router) -> Routing:
    """Compute `route_cpu` with torch operators, on any device."""
    scores = x.float() @ router.weight.float().T
    shared = scores[:, -1].sigmoid() if router.has_shared else None
    scores = scores[:, : router.num_experts]
    if router.bias is not None:
        scores = scores + router.bias
    # Not topk: which of two equal ones it takes is not said.
    ordered, experts = scores.sort(dim=1, descending=True, stable=True)
    ordered = ordered[:, : router.num_chosen] if router.is_normalised else ordered
    shares = ordered.softmax(dim=1)[:, : router.num_chosen]
    return Routing(experts[:, : router.num_chosen].int(), shares, shared)


def grouped_rows(x: Tensor, chosen: Tensor, experts: Sequence[Dense]) -> tuple[Tensor, Tensor]:
    """Compute each expert's rows of `x` `[T, M]`, given the experts of each row `[T, k]`.

    Returns:
        The outputs `[T * k, M]`, those of each expert together, and where that of each row and rank is, `[T, k]` int32.
    """
    order = chosen.flatten().sort(stable=True).indices  # rows and ranks, by expert
    counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=x.device)
    gathered = x[order // chosen.shape[1]].split(counts)
    parts = [expert(rows) for expert, rows in zip(experts, gathered, strict=True) if len(rows)]
    return torch.cat(parts) if parts else x[:0], places.view(chosen.shape)


def experts_cpu(x: Tensor, routing: Routing, shared: Tensor | None, *, experts: "StackedExperts") -> Tensor:
    """Compute rows by experts in two tensors, one after another."""
    rows, places = grouped_rows(x, routing.experts, experts.each)
    return combine(rows, places, routing, shared)


def experts_torch(x: Tensor, routing: Routing, shared: Tensor | None, *, experts: "StackedExperts") -> Tensor:
    """Compute `experts_cpu` with torch operators, on any device."""
    rows, places = grouped_rows(x, routing.experts, experts.each)
    return combine_torch(rows, places, routing, shared)


def combine(rows: Tensor, places: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
    """Add up the outputs `rows` `[P, M]` of each row's experts, at `places` `[T, k]`, by rank; then the shared one."""
    dtype, native = DTYPE_CODES.get(rows.dtype), native_function(*COMBINE)
    if dtype is None or native is None:
        return combine_torch(rows, places, routing, shared)
    shares = routing.shares if routing.shared is None else torch.cat([routing.shares, routing.shared[:, None]], dim=1)
    out = rows.new_empty(places.shape[0], rows.shape[1])
    native(
        dtype,
        rows.data_ptr(),
        rows.stride(0),
        places.data_ptr(),
        shares.contiguous().data_ptr(),
        None if shared is None else shared.data_ptr(),
        0 if shared is None else shared.stride(0),
        out.data_ptr(),
        *out.shape,
        places.shape[1],
    )
    return out


def combine_torch(rows: Tensor, places: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
    """Compute `combine` with torch operators, on any device."""
    out = torch.zeros(places.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for rank in range(places.shape[1]):
        out += routing.shares[:, rank, None] * rows[places[:, rank]].float()
    if shared is not None and routing.shared is not None:
        out += routing.shared[:, None] * shared.float()
    return out.to(rows.dtype)
