"""Masks on the CPU: native.c, or torch operators without the library."""

from torch import Tensor

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function
from sluice.kernels.token_masks.reference import apply_token_masks_reference

SIGNATURE = ("sluice_token_masks", "iplppll")


def apply_token_masks_cpu(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See `apply_token_masks`."""
    dtype, native = DTYPE_CODES.get(logits.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        apply_token_masks_reference(logits, rows, masks)
        return
    stride, vocab_size = logits.stride(0), logits.shape[1]
    native(dtype, logits.data_ptr(), stride, rows.data_ptr(), masks.data_ptr(), rows.numel(), vocab_size)
