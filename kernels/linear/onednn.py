"""oneDNN's prepacked product behind two functions: its operators are private to torch, so only this module uses them.

torch's compiler emits them for frozen weights (torch 2.11 to 2.13).
"""

import torch
from torch import Tensor


def reorder(weight: Tensor) -> Tensor | None:
    """Reorder `weight` `[N, K]` into the product's blocked layout; None if torch cannot."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product(weight.new_zeros(1, weight.shape[1]), packed, None)
    except (AttributeError, RuntimeError, TypeError):
        # The operator is missing, has changed, or rejects this dtype on this machine: the plain product always works.
        return None
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `x` `[T, K]` by the reordered weight, transposed, plus `bias`: `[T, N]`."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
