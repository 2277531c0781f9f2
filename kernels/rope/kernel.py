# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Rotary position embedding in Triton: a program rotates a few heads of one token, optionally in place."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_HEADS = 8


@triton.jit
def load_angles(cos_sin_ptr, position, pairs, inside, R: tl.constexpr):
    """Load cosines and sines `[1, R / 2]` of `position` from the table `[P, R]`."""
    angles_ptr = cos_sin_ptr + position * R
    cos = tl.load(angles_ptr + pairs, mask=inside, other=0.0)
    sin = tl.load(angles_ptr + R // 2 + pairs, mask=inside, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _rope_kernel(
    out_ptr,  # [T, N, D]
    x_ptr,  # [T, N, D]
    positions_ptr,  # [T] int64
    cos_sin_ptr,  # [P, R] float32
    out_stride_token,
    out_stride_head,
    x_stride_token,
    x_stride_head,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One program per (token, block of heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    pairs = tl.arange(0, BLOCK_PAIRS)  # [BLOCK_PAIRS]: element i of the first half goes with i of the second
    inside = (heads < N)[:, None] & (pairs < R // 2)[None, :]

    x_rows = x_ptr + token * x_stride_token + heads[:, None] * x_stride_head  # [BLOCK_N, 1]
    first = tl.load(x_rows + pairs[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_rows + R // 2 + pairs[None, :], mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + token)
    cos, sin = load_angles(cos_sin_ptr, position, pairs, pairs < R // 2, R)

    dtype = out_ptr.dtype.element_ty
    out_rows = out_ptr + token * out_stride_token + heads[:, None] * out_stride_head  # [BLOCK_N, 1]
    tl.store(out_rows + pairs[None, :], (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(out_rows + R // 2 + pairs[None, :], (second * cos + first * sin).to(dtype), mask=inside)
    if R < D:
        rest = R + tl.arange(0, BLOCK_REST)  # [BLOCK_REST]
        inside_rest = (heads < N)[:, None] & (rest < D)[None, :]
        passed = tl.load(x_rows + rest[None, :], mask=inside_rest, other=0.0)
        tl.store(out_rows + rest[None, :], passed, mask=inside_rest)


def rope_triton(x: Tensor, positions: Tensor, cos_sin: Tensor, *, out: Tensor) -> None:
    """Launch the kernel; see `sluice.kernels.rope.rope`."""
    num_tokens, num_heads, head_size = x.shape
    rotary_size = cos_sin.shape[1]
    if num_tokens == 0 or num_heads == 0:
        return
    block_heads = min(BLOCK_HEADS, triton.next_power_of_2(num_heads))
    _rope_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        out,
        x,
        positions,
        cos_sin,
        out.stride(0),
        out.stride(1),
        x.stride(0),
        x.stride(1),
        N=num_heads,
        D=head_size,
        R=rotary_size,
        BLOCK_N=block_heads,
        BLOCK_PAIRS=triton.next_power_of_2(max(rotary_size // 2, 1)),
        BLOCK_REST=triton.next_power_of_2(max(head_size - rotary_size, 1)),
        num_warps=4 if block_heads * head_size >= 512 else 1,
    )
