"""Edit single logits before sampling: biases, bans, penalties on tokens seen. Sparse: work grows with the edits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["NO_BIAS", "Penalties", "apply_penalties"]

NO_BIAS = -0.0
"""Neutral bias: -0.0 is the only number whose addition preserves every bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Edited logits: one entry per (row, token), all `[E]`. An entry of neutral values preserves its logit's bits."""

    rows: Tensor
    """int32."""

    token_ids: Tensor
    """int32; each at most once per row."""

    bias: Tensor
    """float32: added first; -inf bans the token, `NO_BIAS` is neutral."""

    repetition: Tensor
    """float32: positive logits are divided by it, negative ones multiplied (Keskar et al., 2019); 1 if not seen."""

    counts: Tensor
    """float32: occurrences in the output; 0 for a token that is only in the prompt, or not seen."""

    frequency: Tensor
    """float32: subtracted once per occurrence."""

    presence: Tensor
    """float32: subtracted if the count is not 0."""


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Edit logits in place: bias first, then repetition, then frequency and presence.

    Args:
        logits: `[S, V]` float32.
        penalties: entries of some of its rows.
    """
    check(logits.dim() == 2 and logits.dtype == torch.float32, "logits must be [S, V] float32")
    check_rows("logits", logits)
    if path_of("penalties", logits) is Path.TRITON:
        from sluice.kernels.penalties.kernel import apply_penalties_triton as apply
    else:
        from sluice.kernels.penalties.cpu import apply_penalties_cpu as apply
    apply(logits, penalties)
