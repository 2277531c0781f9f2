# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The soft cap in Triton: one program per block of elements."""

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.tanh.kernel import tanh

BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def _soft_cap_kernel(
    x_ptr,  # [size], updated
    size,
    cap,
    BLOCK: tl.constexpr,
):
    """Compute x = cap * tanh(x / cap)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size

    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    capped = cap * tanh(x / cap)
    tl.store(x_ptr + offsets, capped.to(x_ptr.dtype.element_ty), mask=inside)


def soft_cap_triton(x: Tensor, *, cap: float) -> None:
    """Launch the kernel; see `sluice.kernels.soft_cap.soft_cap`."""
    if x.numel() == 0:
        return
    _soft_cap_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), cap, BLOCK=BLOCK)
