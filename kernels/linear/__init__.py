"""The matrix products of a decoder, in the form that is fastest on the device."""

from torch import Tensor

from kernels.checks import check
from kernels.linear.plain import Linear, PlainLinear

__all__ = ["Linear", "pack_linear"]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Prepare `x @ weight.T + bias` for many calls.

    Args:
        weight: `[N, K]`, float32, float16 or bfloat16. May be dropped by the caller afterwards.
        bias: `[N]`, dtype of `weight`.

    Returns:
        A function of `x` `[T, K]`, contiguous rows, to `[T, N]`.

    Raises:
        ValueError: shapes or dtypes disagree.
    """
    check(weight.dim() == 2, "weight must be [N, K], got {}", weight.shape)
    check(bias is None or bias.shape == weight.shape[:1], "bias must be [N]")
    check(bias is None or bias.dtype == weight.dtype, "bias must have the weight's dtype")
    if weight.is_cuda:
        return PlainLinear(weight, bias)
    from kernels.linear.cpu import pack_linear_cpu

    return pack_linear_cpu(weight, bias)
