# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""RMS normalisation in Triton: one program per row, the row in registers."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    out_ptr,  # [T, M]
    x_ptr,  # [T, M]
    residual_ptr,  # [T, M], updated; unused unless HAS_RESIDUAL
    weight_ptr,  # [M]
    out_stride_token,
    x_stride_token,
    residual_stride_token,
    M,
    eps,
    BLOCK_M: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program per token: out[t] = x[t] / rms(x[t]) * weight, where x[t] is residual[t] + x[t] if there is one."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    inside = offsets < M

    x = tl.load(x_ptr + token * x_stride_token + offsets, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + token * residual_stride_token + offsets
        residual = tl.load(residual_ptrs, mask=inside, other=0.0)
        # The norm is of the sum as it is stored, so that the next layer starts from what this one saw.
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, x, mask=inside)

    x = x.to(tl.float32)
    rms = tl.sqrt(tl.sum(x * x, axis=0) / M + eps)
    out = x / rms * weight
    tl.store(out_ptr + token * out_stride_token + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
    """As `kernels.rms_norm.rms_norm`."""
    _launch(x, x, weight, eps=eps, out=out, has_residual=False)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
    """As `kernels.rms_norm.add_rms_norm`."""
    _launch(x, residual, weight, eps=eps, out=out, has_residual=True)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor, has_residual: bool) -> None:
    num_tokens, hidden_size = x.shape
    if num_tokens == 0 or hidden_size == 0:
        return
    block = triton.next_power_of_2(hidden_size)
    _rms_norm_kernel[(num_tokens,)](
        out,
        x,
        residual,
        weight,
        out.stride(0),
        x.stride(0),
        residual.stride(0),
        hidden_size,
        eps,
        BLOCK_M=block,
        HAS_RESIDUAL=has_residual,
        num_warps=min(max(block // 512, 1), 16),
    )
