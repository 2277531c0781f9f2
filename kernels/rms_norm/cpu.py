"""RMS normalisation on the CPU: native.c, or torch's operator without the library, which works on any device."""

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function

SIGNATURE = ("sluice_rms_norm", "iplplppplllffi")


def rms_norm_cpu(
    x: Tensor,
    weight: Tensor | None,
    *,
    residual: Tensor | None = None,
    added_weight: Tensor | None = None,
    eps: float,
    weight_offset: float = 0.0,
    is_centered: bool = False,
    out: Tensor,
) -> None:
    """Write the norm of `x` `[T, M]` to `out`, or add `x`, or its norm, to `residual` and write the norm of the sum."""
    dtype, native = DTYPE_CODES.get(x.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        rms_norm_torch(
            x,
            weight,
            residual=residual,
            added_weight=added_weight,
            eps=eps,
            weight_offset=weight_offset,
            is_centered=is_centered,
            out=out,
        )
        return
    added = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    weights = (None if each is None else each.data_ptr() for each in (weight, added_weight))
    rows = (x.data_ptr(), x.stride(0), *added)
    native(dtype, *rows, *weights, out.data_ptr(), out.stride(0), *x.shape, eps, weight_offset, is_centered)


def rms_norm_torch(
    x: Tensor,
    weight: Tensor | None,
    *,
    residual: Tensor | None = None,
    added_weight: Tensor | None = None,
    eps: float,
    weight_offset: float = 0.0,
    is_centered: bool = False,
    out: Tensor,
) -> None:
    """Compute `rms_norm_cpu` with torch operators."""
    if residual is not None:
        x = residual.add_(x if added_weight is None else normalised(x, added_weight, eps, weight_offset))
    if weight is None:
        return
    if is_centered:
        out.copy_(F.layer_norm(x, weight.shape, weight, None, eps))
    else:
        out.copy_(normalised(x, weight, eps, weight_offset))


def normalised(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """Return the norm of `x` `[..., M]`, in its dtype."""
    if not weight_offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    # In 32 bits, so that the sum of weight and offset is not rounded.
    return F.rms_norm(x.float(), weight.shape, weight.float() + weight_offset, eps).to(x.dtype)
