"""RMS normalisation on the CPU: native.c, or torch's operator without the library, which works on any device."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function

SIGNATURE = ("sluice_rms_norm", "iplplppplllff")


def rms_norm_cpu(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float, out: Tensor) -> None:
    """Write the norm of `x` `[T, M]` to `out`."""
    dtype, native = DTYPE_CODES.get(x.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        rms_norm_torch(x, weight, eps=eps, weight_offset=weight_offset, out=out)
        return
    rows, weights = (x.data_ptr(), x.stride(0), None, 0), (weight.data_ptr(), None)
    native(dtype, *rows, *weights, out.data_ptr(), out.stride(0), *x.shape, eps, weight_offset)


def add_rms_norm_cpu(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    weight_offset: float,
    added_weight: Tensor | None,
    out: Tensor,
) -> None:
    """Add `x`, or its norm, to `residual` in place and write the norm of the sum to `out`."""
    dtype, native = DTYPE_CODES.get(x.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        add_rms_norm_torch(
            x, residual, weight, eps=eps, weight_offset=weight_offset, added_weight=added_weight, out=out
        )
        return
    rows = (x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0))
    weights = (weight.data_ptr(), None if added_weight is None else added_weight.data_ptr())
    native(dtype, *rows, *weights, out.data_ptr(), out.stride(0), *x.shape, eps, weight_offset)


def rms_norm_torch(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float = 0.0, out: Tensor) -> None:
    """Compute `rms_norm_cpu` with torch operators; `x` `[..., M]`."""
    if weight_offset:
        # In 32 bits, so that the sum of weight and offset is not rounded.
        x, weight = x.float(), weight.float() + weight_offset
    out.copy_(F.rms_norm(x, weight.shape, weight, eps))


def add_rms_norm_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    weight_offset: float,
    added_weight: Tensor | None,
    out: Tensor,
) -> None:
    """Compute `add_rms_norm_cpu` with torch operators."""
    added = x if added_weight is None else x.new_empty(x.shape)
    if added_weight is not None:
        rms_norm_torch(x, added_weight, eps=eps, weight_offset=weight_offset, out=added)
    residual.add_(added)
    rms_norm_torch(residual, weight, eps=eps, weight_offset=weight_offset, out=out)
