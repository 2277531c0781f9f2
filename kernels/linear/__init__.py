"""The matrix products of a decoder, in the fastest form for the device."""

import torch
from torch import Tensor

from sluice.kernels.checks import check
from sluice.kernels.gated_activation import Activation
from sluice.kernels.linear.plain import Linear
from sluice.kernels.linear.stored import StoredWeight, is_on_gpu

__all__ = ["Linear", "pack_gated_linear", "pack_linear"]


def pack_linear(weight: StoredWeight, bias: Tensor | None = None, *, is_int8: bool = False) -> Linear:
    """Prepare `x @ weight.T + bias` for many calls.

    Args:
        weight: `[N, K]`, float32, float16 or bfloat16, or in groups or int8. The native product of these multiplies
            rows in bfloat16, rounded to 8 bits; that of a GPU those in 16 bits. The caller may drop it afterwards.
        bias: `[N]`, dtype of `weight`, or of the rows.
        is_int8: keep the weight in int8. The CPU multiplies in int8 too, with rounded rows, for bfloat16 only; CUDA
            multiplies in the dtype of the rows, float16 or bfloat16.

    Returns:
        A function of `x` `[T, K]`, contiguous rows, to `[T, N]`.

    Raises:
        ValueError: shapes or dtypes disagree, or this machine does not support int8 for this weight.
    """
    _check(weight, bias)
    if is_on_gpu(weight):
        from sluice.kernels.linear.cuda import pack_linear_cuda

        return pack_linear_cuda(weight, bias, is_int8=is_int8)
    from sluice.kernels.linear.cpu import pack_linear_cpu

    return pack_linear_cpu(weight, bias, is_int8=is_int8)


def pack_gated_linear(
    weight: StoredWeight, bias: Tensor | None = None, *, activation: Activation, is_int8: bool = False
) -> Linear:
    """Prepare `activation(gate) * up` for many calls, where `x @ weight.T + bias` is the gate, then the up projection.

    As `pack_linear`, with `weight` `[2 * I, K]`; the function returns `[T, I]`.
    """
    _check(weight, bias)
    check(weight.shape[0] % 2 == 0, "weight must be [2 * I, K], got {}", weight.shape)
    if is_on_gpu(weight):
        from sluice.kernels.linear.cuda import pack_gated_linear_cuda

        return pack_gated_linear_cuda(weight, bias, activation=activation, is_int8=is_int8)
    from sluice.kernels.linear.cpu import pack_gated_linear_cpu

    return pack_gated_linear_cpu(weight, bias, activation=activation, is_int8=is_int8)


def _check(weight: StoredWeight, bias: Tensor | None) -> None:
    check(len(weight.shape) == 2, "weight must be [N, K], got {}", weight.shape)
    check(bias is None or bias.shape == weight.shape[:1], "bias must be [N]")
    if isinstance(weight, Tensor) or not is_on_gpu(weight):
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.bfloat16
        check(bias is None or bias.dtype == dtype, "bias must be {}", dtype)
