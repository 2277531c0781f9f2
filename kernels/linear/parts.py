# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The sum of parts of K that programs of a product have summed each by itself, in Triton."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["T", "num_parts"])
def _add_parts_kernel(
    out_ptr,  # [T, N]
    partial_ptr,  # [parts, T, N] float32
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    N,
    num_parts,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (token, block of N): the parts, added in their order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = columns < N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for part in range(num_parts):
        total += tl.load(partial_ptr + (part * T.to(tl.int64) + token) * N + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_parts(parts: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    """Write the sum of `parts` `[parts, T, N]` float32, in their order, plus `bias` `[N]`, to `out` `[T, N]`."""
    num_parts, num_tokens, out_size = parts.shape
    has_bias, given_bias = bias is not None, parts if bias is None else bias
    block = min(1024, triton.next_power_of_2(out_size))
    _add_parts_kernel[(num_tokens, triton.cdiv(out_size, block))](
        out, parts, given_bias, num_tokens, out_size, num_parts, HAS_BIAS=has_bias, BLOCK_N=block, num_warps=4
    )
