"""The soft cap on the CPU: native.c, or torch operators without the library."""

from torch import Tensor

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function

SIGNATURE = ("sluice_soft_cap", "iplf")


def soft_cap_cpu(x: Tensor, *, cap: float) -> None:
    """Cap the elements of `x` in place."""
    dtype, native = DTYPE_CODES.get(x.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        soft_cap_torch(x, cap=cap)
        return
    native(dtype, x.data_ptr(), x.numel(), cap)


def soft_cap_torch(x: Tensor, *, cap: float) -> None:
    """Compute `soft_cap_cpu` with torch operators, on any device."""
    x.copy_((x.float() / cap).tanh_().mul_(cap))
