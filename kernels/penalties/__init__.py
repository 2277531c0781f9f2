"""Change single logits before sampling: penalties on tokens seen, biases, bans. Sparse: work grows with the edits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check, check_rows

__all__ = ["Penalties", "add_bias", "apply_penalties"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Tokens seen by rows with penalties: one entry per (row, token), all `[E]`."""

    rows: Tensor
    """int64."""

    token_ids: Tensor
    """int64; each at most once per row."""

    counts: Tensor
    """float32: times in the output; 0 for a token that only the prompt has."""

    repetition: Tensor
    """float32: positive logits are divided by it, negative ones multiplied (Keskar et al., 2019)."""

    frequency: Tensor
    """float32: times the count is subtracted."""

    presence: Tensor
    """float32: is subtracted where the count is not 0."""


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Penalise tokens seen, in place: repetition first, then frequency and presence.

    Args:
        logits: `[S, V]` float32.
        penalties: entries of some of its rows.
    """
    check(logits.dim() == 2 and logits.dtype == torch.float32, "logits must be [S, V] float32")
    check_rows("logits", logits)
    if logits.is_cuda:
        from kernels.penalties.kernel import apply_penalties_triton as apply
    else:
        from kernels.penalties.cpu import apply_penalties_cpu as apply
    apply(logits, penalties)


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """Add `bias` to single logits, in place; -inf bans a token. By torch everywhere: equal pairs must add up in order.

    Args:
        logits: `[S, V]` float32.
        rows: `[E]` int64.
        token_ids: `[E]` int64; a pair of row and token may come more than once.
        bias: `[E]` float32.
    """
    check(logits.dim() == 2 and logits.dtype == torch.float32, "logits must be [S, V] float32")
    logits.index_put_((rows, token_ids), bias, accumulate=True)
