"""Log-probabilities of a row's chosen token and of its likeliest ones."""

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["logprobs"]


def logprobs(logits: Tensor, token_ids: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of `token_ids` and of the `count` likeliest tokens of each row.

    A row's results do not depend on the other rows, bit by bit.

    Args:
        logits: `[A, V]` float32; rows may be strided.
        token_ids: `[A]` int64, each from 0 to V - 1.
        count: from 0 to V.

    Returns:
        `[A, 1]` of the tokens, `[A, count]` of the likeliest in descending order, and their ids `[A, count]` int64.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    check(logits.dim() == 2 and logits.dtype == torch.float32, "logits must be [A, V] float32, got {}", logits.shape)
    check_rows("logits", logits)
    check(token_ids.shape == logits.shape[:1], "token_ids must be {}, got {}", logits.shape[:1], token_ids.shape)
    check(0 <= count <= logits.shape[1], "count must be from 0 to {}, got {}", logits.shape[1], count)
    if path_of("logprobs", logits) is Path.TRITON:
        from sluice.kernels.logprobs.kernel import logprobs_triton as compute
    else:
        from sluice.kernels.logprobs.cpu import logprobs_cpu as compute
    return compute(logits, token_ids, count=count)
