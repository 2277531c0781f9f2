# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Mixtures of experts in Triton: routing, grouping, products of each expert's rows, and the sum of a row's experts.

Nothing depends on the other rows of a step: a score is summed along M, and a product along K, in blocks of fixed sizes
in their order; experts are added up by rank. The number of programs depends on the number of rows alone, so a step can
be recorded: programs without rows end at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.experts.routing import Router, Routing
from sluice.kernels.experts.stacked import Stacked, StackedExperts
from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.kernel import gated

_SCORED = 4096
"""Weights of a router that a program multiplies at a time."""

_GROUPED = 1024
"""Rows and ranks that a program looks at, at a time."""

_COMBINED = 1024
"""Elements of a row that a program adds up."""


@triton.jit
def _route_kernel(
    experts_ptr,  # [T, NUM_CHOSEN] int32
    shares_ptr,  # [T, NUM_CHOSEN] float32
    shared_ptr,  # [T] float32; unused unless HAS_SHARED
    x_ptr,  # [T, M]
    weight_ptr,  # [E + HAS_SHARED, M]
    bias_ptr,  # [E] float32; unused unless HAS_BIAS
    x_stride_token,
    M,
    E,
    NUM_CHOSEN: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program per token: scores, the best of them by value and then id, and their shares."""
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    has_row = ids < E + HAS_SHARED
    scores = tl.zeros([BLOCK_E], dtype=tl.float32)
    for first in range(0, M, BLOCK_M):
        ms = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        x = tl.load(x_ptr + token * x_stride_token + ms, mask=ms < M, other=0.0).to(tl.float32)
        inside = has_row[:, None] & (ms < M)[None, :]
        weight = tl.load(weight_ptr + ids[:, None].to(tl.int64) * M + ms[None, :], mask=inside, other=0.0)
        scores += tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    if HAS_SHARED:
        gate = tl.sum(tl.where(ids == E, scores, 0.0), axis=0)
        tl.store(shared_ptr + token, 1.0 / (1.0 + tl.exp(-gate)))
    is_expert = ids < E
    if HAS_BIAS:
        scores += tl.load(bias_ptr + ids, mask=is_expert, other=0.0)

    # What is no number comes last, but before what is no expert.
    left = tl.where(is_expert, tl.where(scores == scores, tl.maximum(scores, -3.4e38), -3.4e38), float("-inf"))
    largest = tl.max(left, axis=0)
    ranks = tl.full([BLOCK_E], NUM_CHOSEN, dtype=tl.int32)
    for rank in range(NUM_CHOSEN):
        best = tl.min(tl.where(left == tl.max(left, axis=0), ids, BLOCK_E), axis=0)
        ranks = tl.where(ids == best, rank, ranks)
        left = tl.where(ids == best, float("-inf"), left)
    is_chosen = ranks < NUM_CHOSEN
    powers = tl.where(is_chosen if IS_NORMALISED else is_expert, tl.exp(scores - largest), 0.0)
    shares = powers / tl.sum(powers, axis=0)
    tl.store(experts_ptr + token * NUM_CHOSEN + ranks, ids, mask=is_chosen)
    tl.store(shares_ptr + token * NUM_CHOSEN + ranks, shares, mask=is_chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    counts_ptr,  # [E] int32
    experts_ptr,  # [num_pairs] int32
    num_pairs,
    BLOCK: tl.constexpr,
):
    """One program per expert: how many rows it computes."""
    expert = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, num_pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += (tl.load(experts_ptr + at, mask=at < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    pairs_ptr,  # [blocks, BLOCK_T] int32: rows and ranks, those of an expert together; -1 where its last block ends
    block_experts_ptr,  # [blocks] int32
    num_blocks_ptr,  # [1] int32
    counts_ptr,  # [E] int32
    experts_ptr,  # [num_pairs] int32
    num_pairs,
    E,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert: the blocks of its rows, in their order."""
    expert = tl.program_id(0)
    ids = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    counts = tl.load(counts_ptr + ids, mask=ids < E, other=0)
    blocks = (counts + BLOCK_T - 1) // BLOCK_T
    first_block = tl.sum(tl.where(ids < expert, blocks, 0), axis=0)
    own_blocks = tl.sum(tl.where(ids == expert, blocks, 0), axis=0)
    tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for block in range(own_blocks):
        tl.store(block_experts_ptr + first_block + block, expert)
    place = first_block * BLOCK_T
    for first in range(0, num_pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_own = tl.load(experts_ptr + at, mask=at < num_pairs, other=-1) == expert
        own = is_own.to(tl.int32)
        tl.store(pairs_ptr + place + tl.cumsum(own, axis=0) - 1, at, mask=is_own)
        place += tl.sum(own, axis=0)
    end = (first_block + own_blocks) * BLOCK_T
    rest = place + tl.arange(0, BLOCK_T)
    tl.store(pairs_ptr + rest, tl.full([BLOCK_T], -1, dtype=tl.int32), mask=rest < end)


@triton.jit
def _product_kernel(
    out_ptr,  # [pairs, N]
    x_ptr,  # [rows, K]
    weight_ptr,  # [E, N, K], contiguous; [E, 2 * N, K], gate then up projection, when IS_GATED
    scales_ptr,  # [E, N] or [E, 2 * N] float32; unused unless IS_INT8
    bias_ptr,  # [E, N] or [E, 2 * N]; unused unless HAS_BIAS
    pairs_ptr,  # [blocks, BLOCK_T]
    block_experts_ptr,
    num_blocks_ptr,
    x_stride_row,
    N,
    K,
    PAIRS_PER_ROW: tl.constexpr,  # of x
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (block of an expert's rows, block of N)."""
    block = tl.program_id(0)
    if block < tl.load(num_blocks_ptr):
        expert = tl.load(block_experts_ptr + block).to(tl.int64)
        pairs = tl.load(pairs_ptr + block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [BLOCK_T]
        has_pair = (pairs >= 0)[None, :]
        columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        has_column = (columns < N)[:, None]
        num_rows = 2 * N if IS_GATED else N
        weight_rows = weight_ptr + (expert * num_rows + columns[:, None]) * K  # [BLOCK_N, 1]
        x_rows = x_ptr + (pairs[None, :] // PAIRS_PER_ROW) * x_stride_row  # [1, BLOCK_T]
        acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
        for first in range(0, K, BLOCK_K):
            ks = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
            inside = has_column & (ks < K)[None, :]
            x = tl.load(x_rows + ks[:, None], mask=has_pair & (ks < K)[:, None], other=0.0)
            weight = tl.load(weight_rows + ks[None, :], mask=inside, other=0).to(x.dtype)
            acc = tl.dot(weight, x, acc=acc, input_precision="ieee")
            if IS_GATED:
                other = tl.load(weight_rows + tl.cast(N, tl.int64) * K + ks[None, :], mask=inside, other=0).to(x.dtype)
                up = tl.dot(other, x, acc=up, input_precision="ieee")
        vector = expert * num_rows + columns
        if IS_INT8:
            acc *= tl.load(scales_ptr + vector, mask=columns < N, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + vector, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            if IS_INT8:
                up *= tl.load(scales_ptr + vector + N, mask=columns < N, other=0.0)[:, None]
            if HAS_BIAS:
                up += tl.load(bias_ptr + vector + N, mask=columns < N, other=0.0).to(tl.float32)[:, None]
            acc = gated(acc, up, ACTIVATION)
        at = pairs[None, :] * N + columns[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=has_column & has_pair)


@triton.jit
def _combine_kernel(
    out_ptr,  # [T, M]
    rows_ptr,  # [T, NUM_CHOSEN, M]
    shares_ptr,  # [T, NUM_CHOSEN] float32
    shared_ptr,  # [T, M]; unused unless HAS_SHARED
    shared_shares_ptr,  # [T] float32
    M,
    NUM_CHOSEN: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program per (token, block of M)."""
    token = tl.program_id(0).to(tl.int64)
    ms = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    inside = ms < M
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for rank in range(NUM_CHOSEN):
        row = tl.load(rows_ptr + (token * NUM_CHOSEN + rank) * M + ms, mask=inside, other=0.0)
        total += row.to(tl.float32) * tl.load(shares_ptr + token * NUM_CHOSEN + rank)
    if HAS_SHARED:
        row = tl.load(shared_ptr + token * M + ms, mask=inside, other=0.0)
        total += row.to(tl.float32) * tl.load(shared_shares_ptr + token)
    tl.store(out_ptr + token * M + ms, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows and ranks by expert, in blocks."""

    pairs: Tensor
    """`[blocks, BLOCK_T]` int32; -1 past the last of an expert. Blocks after `num_blocks` are not written."""

    block_experts: Tensor
    """`[blocks]` int32."""

    num_blocks: Tensor
    """`[1]` int32."""


def route_triton(x: Tensor, router: Router) -> Routing:
    """Launch the kernel; see `sluice.kernels.experts.route`."""
    num_tokens, device = x.shape[0], x.device
    experts = torch.empty(num_tokens, router.num_chosen, dtype=torch.int32, device=device)
    shares = torch.empty(num_tokens, router.num_chosen, dtype=torch.float32, device=device)
    shared = torch.empty(num_tokens, dtype=torch.float32, device=device) if router.has_shared else None
    if num_tokens:
        block_e = triton.next_power_of_2(router.weight.shape[0])
        _route_kernel[(num_tokens,)](
            experts,
            shares,
            shares if shared is None else shared,
            x,
            router.weight,
            shares if router.bias is None else router.bias,
            x.stride(0),
            x.shape[1],
            router.num_experts,
            NUM_CHOSEN=router.num_chosen,
            IS_NORMALISED=router.is_normalised,
            HAS_BIAS=router.bias is not None,
            HAS_SHARED=router.has_shared,
            BLOCK_E=block_e,
            BLOCK_M=max(16, _SCORED // block_e),
            num_warps=4,
        )
    return Routing(experts, shares, shared)


def rows_of_block(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a block: few where experts have few, since a block reads all of a weight's tile."""
    return 16 if num_pairs <= 16 * num_experts else 64


def group_triton(experts: Tensor, num_experts: int, block_t: int) -> Grouping:
    """Lay out rows and ranks by expert; `experts` `[T, k]` int32."""
    num_pairs, device = experts.numel(), experts.device
    most = min(num_experts, num_pairs) + num_pairs // block_t
    counts, block_experts, num_blocks = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (num_experts, most, 1)
    )
    pairs = torch.empty(most, block_t, dtype=torch.int32, device=device)
    _count_kernel[(num_experts,)](counts, experts, num_pairs, BLOCK=_GROUPED, num_warps=4)
    _place_kernel[(num_experts,)](
        pairs,
        block_experts,
        num_blocks,
        counts,
        experts,
        num_pairs,
        num_experts,
        BLOCK_T=block_t,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK=_GROUPED,
        num_warps=4,
    )
    return Grouping(pairs, block_experts, num_blocks)


def product_triton(
    x: Tensor, stacked: Stacked, grouping: Grouping, *, pairs_per_row: int, activation: Activation | None
) -> Tensor:
    """Multiply each row and rank by the matrix of its expert; with an activation, the first half gates the second."""
    _, num_rows, in_size = stacked.weight.shape
    out_size = num_rows // 2 if activation else num_rows
    out = x.new_empty(x.shape[0] * pairs_per_row, out_size)
    most, block_t = grouping.pairs.shape
    is_wide = x.element_size() == 4
    block_n, block_k = (32, 32) if is_wide else (64, 64)
    _product_kernel[(most, triton.cdiv(out_size, block_n))](
        out,
        x,
        stacked.weight,
        stacked.weight if stacked.scales is None else stacked.scales,
        stacked.weight if stacked.bias is None else stacked.bias,
        grouping.pairs,
        grouping.block_experts,
        grouping.num_blocks,
        x.stride(0),
        out_size,
        in_size,
        PAIRS_PER_ROW=pairs_per_row,
        IS_GATED=activation is not None,
        ACTIVATION=activation or "",
        IS_INT8=stacked.scales is not None,
        HAS_BIAS=stacked.bias is not None,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=2 if is_wide else 3,
    )
    return out


def experts_triton(x: Tensor, routing: Routing, shared: Tensor | None, *, experts: StackedExperts) -> Tensor:
    """Launch the kernels; see `sluice.kernels.experts.Experts`."""
    num_chosen, out = routing.experts.shape[1], torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[0] == 0:
        return out
    num_experts = experts.gate_up.weight.shape[0]
    grouping = group_triton(routing.experts, num_experts, rows_of_block(routing.experts.numel(), num_experts))
    inner = product_triton(x, experts.gate_up, grouping, pairs_per_row=num_chosen, activation=experts.activation)
    rows = product_triton(inner, experts.down, grouping, pairs_per_row=1, activation=None)
    has_shared = shared is not None and routing.shared is not None
    block = min(_COMBINED, triton.next_power_of_2(x.shape[1]))
    _combine_kernel[(x.shape[0], triton.cdiv(x.shape[1], block))](
        out,
        rows,
        routing.shares,
        shared if has_shared else rows,
        routing.shared if has_shared else routing.shares,
        x.shape[1],
        NUM_CHOSEN=num_chosen,
        HAS_SHARED=has_shared,
        BLOCK_M=block,
        num_warps=4,
    )
    return out
