"""Copies of rows of logits in float32, to be edited."""

import torch
from torch import Tensor

from sluice.kernels.checks import check, check_rows

__all__ = ["float_rows"]


def float_rows(logits: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of some rows of `logits` in float32.

    Args:
        logits: `[R, V]`, of any float type; rows may be strided.
        rows: `[E]` int64, contiguous; each from 0 to R - 1.

    Returns:
        `[E, V]` float32, contiguous.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    check(logits.dim() == 2, "logits must be [R, V], got {}", logits.shape)
    check_rows("logits", logits)
    check(rows.dim() == 1 and rows.dtype == torch.int64 and rows.is_contiguous(), "rows must be contiguous [E] int64")
    if logits.is_cuda:
        return logits.index_select(0, rows).float()
    from sluice.kernels.float_rows.cpu import float_rows_cpu

    return float_rows_cpu(logits, rows)
