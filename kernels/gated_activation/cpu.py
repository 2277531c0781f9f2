"""The gate on the CPU: torch's operators."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from kernels.gated_activation import Activation


def gated_activation_cpu(gate_up: Tensor, *, activation: Activation, out: Tensor) -> None:
    """Write `activation(gate) * up` to `out` `[T, I]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.mul(gated, up, out=gated)
    out.copy_(gated)
