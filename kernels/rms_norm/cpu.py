"""RMS normalisation on the CPU: native.c, or torch's operator where there is no library."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from kernels.native import DTYPE_CODES, native_function

SIGNATURE = ("sluice_rms_norm", "iplplpplllf")


def rms_norm_cpu(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
    """Write the norm of `x` `[T, M]` to `out`."""
    dtype, native = DTYPE_CODES.get(x.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        rms_norm_torch(x, weight, eps=eps, out=out)
        return
    rows, size = x.shape
    native(dtype, x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), out.data_ptr(), out.stride(0), rows, size, eps)


def add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
    """Add `x` to `residual` in place and write the norm of the sum to `out`."""
    dtype, native = DTYPE_CODES.get(x.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        residual.add_(x)
        rms_norm_torch(residual, weight, eps=eps, out=out)
        return
    native(
        dtype,
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        x.shape[1],
        eps,
    )


def rms_norm_torch(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
    """`rms_norm_cpu` in torch's operators."""
    out.copy_(F.rms_norm(x, weight.shape, weight, eps))
