"""Definition of log-probabilities: the softmax's logarithm in float64; the lowest id first among equal logits."""

import torch
from torch import Tensor


def logprobs_reference(logits: Tensor, token_ids: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return those of `token_ids` `[A]` and of the likeliest tokens of `logits` `[A, V]`, with the latter's ids."""
    wide = torch.log_softmax(logits.double(), dim=-1)
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :count]
    return wide.gather(1, token_ids[:, None]), wide.gather(1, ids), ids
