"""Log-probabilities of a row's chosen token and of its likeliest ones."""

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["logprobs"]


def logprobs(
    logits: Tensor, token_ids: Tensor, *, count: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of `token_ids` and of the `count` likeliest tokens of each row.

    A row's results do not depend on the other rows, bit by bit.

    Args:
        logits: `[R, V]`, of any float type; rows may be strided.
        token_ids: `[A]` int64, each from 0 to V - 1.
        count: from 0 to V.
        rows: `[A]` int64, the rows that are asked for; all of them without.

    Returns:
        `[A, 1]` of the tokens, `[A, count]` of the likeliest in descending order, and their ids `[A, count]` int64.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    check(logits.dim() == 2, "logits must be [R, V], got {}", logits.shape)
    check_rows("logits", logits)
    num_rows, vocab_size = logits.shape
    asked = token_ids.shape if rows is None else rows.shape
    check(rows is not None or asked == (num_rows,), "token_ids must be [{}], got {}", num_rows, token_ids.shape)
    check(token_ids.shape == asked, "token_ids must be {}, got {}", asked, token_ids.shape)
    check(0 <= count <= vocab_size, "count must be from 0 to {}, got {}", vocab_size, count)
    path = path_of("logprobs", logits)
    if path is Path.TRITON:
        from sluice.kernels.logprobs.kernel import logprobs_triton as compute
    elif path is Path.TORCH:
        from sluice.kernels.logprobs.cpu import logprobs_torch as compute
    else:
        from sluice.kernels.logprobs.cpu import logprobs_cpu as compute
    all_rows = torch.arange(num_rows, device=logits.device) if rows is None else rows
    return compute(logits, all_rows, token_ids.contiguous(), count=count)
