"""Change single logits before sampling: biases, bans, penalties on tokens seen. Sparse: work grows with the edits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check, check_rows

__all__ = ["NO_BIAS", "Penalties", "apply_penalties"]

NO_BIAS = -0.0
"""The bias of a token that has none: the only number that keeps the bits of whatever it is added to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Logits that change: one entry per (row, token), all `[E]`. An entry that says 1 and 0 keeps its logit's bits."""

    rows: Tensor
    """int32."""

    token_ids: Tensor
    """int32; each at most once per row."""

    bias: Tensor
    """float32: is added before all else; -inf bans the token, `NO_BIAS` is none."""

    repetition: Tensor
    """float32: positive logits are divided by it, negative ones multiplied (Keskar et al., 2019); 1 if not seen."""

    counts: Tensor
    """float32: times in the output; 0 for a token that only the prompt has, or that was not seen."""

    frequency: Tensor
    """float32: times the count is subtracted."""

    presence: Tensor
    """float32: is subtracted where the count is not 0."""


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Change logits in place: bias first, then repetition, then frequency and presence.

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
