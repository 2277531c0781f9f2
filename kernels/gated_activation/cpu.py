"""The gate on the CPU: native.c, or torch operators without the library."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.gated_activation import Activation
from sluice.kernels.native import native_function

SIGNATURE = ("sluice_gated_activation", "iiplplll")
ACTIVATION_CODES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2}


def gated_activation_cpu(gate_up: Tensor, *, activation: Activation, out: Tensor) -> None:
    """Write `activation(gate) * up` to `out` `[T, I]`."""
    dtype, native = DTYPE_CODES.get(gate_up.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        gated_activation_torch(gate_up, activation=activation, out=out)
        return
    native(
        dtype,
        ACTIVATION_CODES[activation],
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        out.stride(0),
        out.shape[0],
        out.shape[1],
    )


def gated_activation_torch(gate_up: Tensor, *, activation: Activation, out: Tensor) -> None:
    """Compute `gated_activation_cpu` with torch operators."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        gated = gate * torch.sigmoid(1.702 * gate)
    else:
        gated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    out.copy_(torch.mul(gated, up, out=gated))
