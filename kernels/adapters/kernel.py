# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""What adapters add, in Triton: two launches, of tiles of sixteen rows for each adapter that a tile has.

The first multiplies with `down`, the second with `up`. A program of a tile and an adapter that no row of the tile has
ends at once. Tiles are equal whatever is in the step, and a row takes part in those of its own adapter alone, so its
bits do not depend on other rows.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from sluice.kernels.adapters import AdapterBank, RowPlaces

_BLOCK_T = 16
_LEAST_RANKS = 16
"""The matrix unit multiplies blocks of sixteen and more."""


@triton.jit
def _shrink_kernel(
    shrunk_ptr,  # [T, R] float32
    x_ptr,  # [T, K]
    places_ptr,  # [T] int32
    down_ptr,  # [P, R, K], contiguous
    x_stride_token,
    T,
    R,
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of rows, adapter and block of ranks: shrunk[t] = x[t] times `down` of the adapter."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    place = tl.program_id(1).to(tl.int64)
    ranks = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    is_own = tl.load(places_ptr + tokens, mask=tokens < T, other=-1) == place
    if tl.max(is_own.to(tl.int32), axis=0) == 0:
        return
    has_rank = ranks < R
    acc = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        inside = ks < K
        x = tl.load(
            x_ptr + tokens[:, None] * x_stride_token + ks[None, :], mask=is_own[:, None] & inside[None, :], other=0.0
        )
        down = tl.load(
            down_ptr + (place * R + ranks[None, :]) * K + ks[:, None],
            mask=has_rank[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(x, down, acc, input_precision="ieee")
    tl.store(shrunk_ptr + tokens[:, None] * R + ranks[None, :], acc, mask=is_own[:, None] & has_rank[None, :])


@triton.jit
def _expand_kernel(
    out_ptr,  # [T, N], added to
    shrunk_ptr,  # [T, R] float32
    places_ptr,  # [T] int32
    up_ptr,  # [P, N, RANK], contiguous
    blocks_ptr,  # [B, 3] int32: first column, end, first number of `shrunk`
    out_stride_token,
    T,
    R,
    N,
    RANK,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """One program per tile of rows, adapter and block of columns: out[t] += shrunk[t] times `up` of the adapter."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    place = tl.program_id(1).to(tl.int64)
    is_own = tl.load(places_ptr + tokens, mask=tokens < T, other=-1) == place
    if tl.max(is_own.to(tl.int32), axis=0) == 0:
        return
    block_ptr = blocks_ptr + tl.program_id(2) * 3
    columns = tl.load(block_ptr) + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    has_column = columns < tl.load(block_ptr + 1)
    source = tl.load(block_ptr + 2)
    acc = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for start in range(0, RANK, BLOCK_RANK):
        ranks = start + tl.arange(0, BLOCK_RANK)  # [BLOCK_RANK]
        has_rank = ranks < RANK
        numbers = tl.load(
            shrunk_ptr + tokens[:, None] * R + source + ranks[None, :],
            mask=is_own[:, None] & has_rank[None, :],
            other=0.0,
        )
        up = tl.load(
            up_ptr + (place * N + columns[None, :]) * RANK + ranks[:, None],
            mask=has_column[None, :] & has_rank[:, None],
            other=0.0,
        )
        acc = tl.dot(numbers, up.to(tl.float32), acc, input_precision="ieee")
    out_ptrs = out_ptr + tokens[:, None] * out_stride_token + columns[None, :]
    is_stored = is_own[:, None] & has_column[None, :]
    out = tl.load(out_ptrs, mask=is_stored, other=0.0).to(tl.float32) + acc
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_stored)


def add_adapters_triton(out: Tensor, x: Tensor, bank: "AdapterBank", rows: "RowPlaces") -> None:
    """Launch the kernels; see `sluice.kernels.adapters`."""
    num_tokens, in_size = x.shape
    num_places, num_ranks, _ = bank.down.shape
    if num_tokens == 0:
        return
    shrunk = torch.empty(num_tokens, num_ranks, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_tokens, _BLOCK_T)
    block_r = min(64, max(_LEAST_RANKS, triton.next_power_of_2(bank.rank)))
    _shrink_kernel[(tiles, num_places, triton.cdiv(num_ranks, block_r))](
        shrunk,
        x,
        rows.places,
        bank.down,
        x.stride(0),
        num_tokens,
        num_ranks,
        in_size,
        BLOCK_T=_BLOCK_T,
        BLOCK_R=block_r,
        BLOCK_K=min(128, triton.next_power_of_2(in_size)),
    )
    _expand_kernel[(tiles, num_places, bank.blocks.shape[0])](
        out,
        shrunk,
        rows.places,
        bank.up,
        bank.blocks,
        out.stride(0),
        num_tokens,
        num_ranks,
        out.shape[1],
        bank.rank,
        BLOCK_T=_BLOCK_T,
        BLOCK_N=64,
        # More ranks at once, in float32, would not fit the registers.
        BLOCK_RANK=_LEAST_RANKS,
    )
