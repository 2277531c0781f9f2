"""Memory for the native kernels of rows of logits, kept between steps: a fresh one is mapped page by page."""

import threading

import torch
from torch import Tensor

_CANDIDATE_PADDING = 16
_of_thread = threading.local()


def row_scratch(num_threads: int, vocab_size: int) -> Tensor:
    """Return space for every token of a row as a candidate and as two numbers, per thread of a team.

    Each caller's thread has its own, since two may compute at once; overwritten by its next call.

    Returns:
        `[num_threads * 2 * (V + 16)]` int64, or more; undefined.
    """
    size = num_threads * 2 * (vocab_size + _CANDIDATE_PADDING)
    held: Tensor | None = getattr(_of_thread, "scratch", None)
    if held is None or held.numel() < size:
        held = _of_thread.scratch = torch.empty(size, dtype=torch.int64)
    return held
