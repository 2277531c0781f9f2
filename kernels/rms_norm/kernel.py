# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""RMS and layer normalisation in Triton: one program per row, the row in registers."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normalised(x, weight, M, eps):
    """Scale a row of M float32, zeros beyond, to unit root mean square, then by `weight`."""
    return x / tl.sqrt(tl.sum(x * x, axis=0) / M + eps) * weight


@triton.jit
def _rms_norm_kernel(
    out_ptr,  # [T, M]
    x_ptr,  # [T, M]
    residual_ptr,  # [T, M], updated; unused unless HAS_RESIDUAL
    weight_ptr,  # [M]; unused unless HAS_NORM
    added_weight_ptr,  # [M], unused unless HAS_ADDED_NORM
    out_stride_token,
    x_stride_token,
    residual_stride_token,
    M,
    eps,
    weight_offset,
    BLOCK_M: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_ADDED_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_CENTERED: tl.constexpr,
):
    """One program per token: out[t] = x[t] / rms(x[t]) * (weight_offset + weight).

    There x[t] is residual[t] + x[t] if there is a residual; with HAS_ADDED_NORM, residual[t] + norm(x[t]). With
    IS_CENTERED, its mean is subtracted before that.
    """
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    inside = offsets < M

    x = tl.load(x_ptr + token * x_stride_token + offsets, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + token * residual_stride_token + offsets
        residual = tl.load(residual_ptrs, mask=inside, other=0.0)
        if HAS_ADDED_NORM:
            added_weight = tl.load(added_weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32) + weight_offset
            # Rounded before it is added, as in separate steps.
            x = _normalised(x.to(tl.float32), added_weight, M, eps).to(out_ptr.dtype.element_ty)
        # The norm is of the sum as stored, so that the next layer starts from the same values.
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, x, mask=inside)

    if HAS_NORM:
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32) + weight_offset
        wide = x.to(tl.float32)
        if IS_CENTERED:
            wide = tl.where(inside, wide - tl.sum(wide, axis=0) / M, 0.0)
        out = _normalised(wide, weight, M, eps)
        tl.store(out_ptr + token * out_stride_token + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(
    x: Tensor,
    weight: Tensor | None,
    *,
    residual: Tensor | None = None,
    added_weight: Tensor | None = None,
    eps: float,
    weight_offset: float = 0.0,
    is_centered: bool = False,
    out: Tensor,
) -> None:
    """Launch the kernel; see `sluice.kernels.rms_norm`."""
    num_tokens, hidden_size = x.shape
    if num_tokens == 0 or hidden_size == 0:
        return
    block = triton.next_power_of_2(hidden_size)
    total = x if residual is None else residual
    _rms_norm_kernel[(num_tokens,)](
        out,
        x,
        total,
        x if weight is None else weight,
        x if added_weight is None else added_weight,
        out.stride(0),
        x.stride(0),
        total.stride(0),
        hidden_size,
        eps,
        weight_offset,
        BLOCK_M=block,
        HAS_RESIDUAL=residual is not None,
        HAS_ADDED_NORM=added_weight is not None,
        HAS_NORM=weight is not None,
        IS_CENTERED=is_centered,
        num_warps=min(max(block // 512, 1), 16),
    )
