"""The gate of a SwiGLU or GeGLU feed-forward block (Shazeer, 2020)."""

from typing import Literal

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["Activation", "gated_activation"]

Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]
"""The last is that of gpt-oss: the gate is cut above 7 and multiplied by the logistic of 1.702 times it; what it gates
is cut to 7 in size, and one is added."""


def gated_activation(gate_up: Tensor, *, activation: Activation = "silu", out: Tensor | None = None) -> Tensor:
    """Return `activation(gate) * up`, of gpt-oss `activation(gate) * (up + 1)`. Float32 inside, rounded once.

    Args:
        gate_up: `[T, 2 * I]`: the gate, then the up projection. Rows may be strided, the last dimension is contiguous.
        activation: applied to the gate.
        out: `[T, I]`, dtype of `gate_up`; allocated if None.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    check(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gate_up must be [T, 2 * I], got {}", gate_up.shape)
    check_rows("gate_up", gate_up)
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    out = gate_up.new_empty(shape) if out is None else out
    check(out.shape == torch.Size(shape) and out.dtype == gate_up.dtype, "out must be {} {}", shape, gate_up.dtype)
    check_rows("out", out)
    path = path_of("gated_activation", gate_up)
    if path is Path.TRITON:
        from sluice.kernels.gated_activation.kernel import gated_activation_triton as gate
    elif path is Path.TORCH:
        from sluice.kernels.gated_activation.cpu import gated_activation_torch as gate
    else:
        from sluice.kernels.gated_activation.cpu import gated_activation_cpu as gate
    gate(gate_up, activation=activation, out=out)
    return out
