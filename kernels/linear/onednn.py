"""oneDNN's prepacked product behind two functions: the operators are private to torch, so nothing else uses them.

They are what torch's compiler emits for frozen weights (torch 2.11 to 2.13).
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import Tensor


def reorder(weight: Tensor) -> Tensor | None:
    """`weight` `[N, K]` in the blocked layout that the product reads fastest; None where torch cannot make one."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product(weight.new_zeros(1, weight.shape[1]), packed, None)
    except (AttributeError, RuntimeError, TypeError):
        # The operator is gone, has changed, or refuses this dtype on this machine: the plain product is always there.
        return None
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`x` `[T, K]` times the reordered weight, transposed, plus `bias`: `[T, N]`."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
