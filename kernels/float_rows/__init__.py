"""Copies of rows of logits in float32, to be edited."""

import torch
from torch import Tensor

from sluice.kernels.checks import check, check_rows

__all__ = ["float_rows"]


def float_rows(logits: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of some rows of `logits` in float32.

    Args:
        logits: `[R, V]`, of any float type; rows may be strided.
        rows: `[E]` int64, contiguous; each from 0 to R - 1.
        out: `[E, V]` float32, contiguous; allocated if None. A GPU writes to new memory.

    Returns:
        `[E, V]` float32, contiguous: `out` on the CPU, if it is given.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    check(logits.dim() == 2, "logits must be [R, V], got {}", logits.shape)
    check_rows("logits", logits)
    check(rows.dim() == 1 and rows.dtype == torch.int64 and rows.is_contiguous(), "rows must be contiguous [E] int64")
    shape = (len(rows), logits.shape[1])
    check(out is None or (out.shape == shape and out.dtype == torch.float32), "out must be {} float32", shape)
    if logits.is_cuda:
        return logits.index_select(0, rows).float()
    from sluice.kernels.float_rows.cpu import float_rows_cpu

    return float_rows_cpu(logits, rows, out)
