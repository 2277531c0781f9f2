"""Definition of the gate. Float32 inside; float64 tensors stay float64."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.gated_activation import Activation


def gated_activation_reference(gate_up: Tensor, *, activation: Activation = "silu") -> Tensor:
    """Return `activation(gate) * up` `[T, I]` of `gate_up` `[T, 2 * I]`."""
    wide = torch.float64 if gate_up.dtype == torch.float64 else torch.float32
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    if activation == "swiglu_clamped":
        gate = gate.clamp(max=7)
        return (gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)).to(gate_up.dtype)
    gated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gated * up).to(gate_up.dtype)
