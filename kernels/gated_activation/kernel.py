# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The gate of a feed-forward block in Triton: elementwise, one pass."""

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.gated_activation import Activation

BLOCK = 1024


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return what a gate makes of its two projections, float32."""
    if ACTIVATION == "swiglu_clamped":
        # A comparison with a NaN is false.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        argument = 1.702 * gate
    elif ACTIVATION == "silu":
        argument = gate
    else:
        # gelu_tanh(x) = x * (1 + tanh(u)) / 2 = x * sigmoid(2 * u): no tanh, no overflow.
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-argument)) * up


@triton.jit
def _gated_activation_kernel(
    out_ptr,  # [T, I]
    gate_up_ptr,  # [T, 2 * I]
    out_stride_token,
    gate_up_stride_token,
    I,  # noqa: E741 - the shape letter
    ACTIVATION: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One program per (token, block of I): out[t] = activation(gate[t]) * up[t]."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)  # [BLOCK_I]
    inside = offsets < I

    gate_ptrs = gate_up_ptr + token * gate_up_stride_token + offsets
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + I, mask=inside, other=0.0).to(tl.float32)
    out = gated(gate, up, ACTIVATION)

    tl.store(out_ptr + token * out_stride_token + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation_triton(gate_up: Tensor, *, activation: Activation = "silu", out: Tensor) -> None:
    """Launch the kernel; see `sluice.kernels.gated_activation.gated_activation`."""
    num_tokens, intermediate_size = out.shape
    if num_tokens == 0 or intermediate_size == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(intermediate_size))
    _gated_activation_kernel[(num_tokens, triton.cdiv(intermediate_size, block))](
        out,
        gate_up,
        out.stride(0),
        gate_up.stride(0),
        intermediate_size,
        ACTIVATION=activation,
        BLOCK_I=block,
        num_warps=4,
    )
