"""Biases and penalties with torch operators: work grows with the entries, not with the vocabulary."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import Tensor

from sluice.kernels.penalties import Penalties


def apply_penalties_cpu(logits: Tensor, penalties: Penalties) -> None:
    """Apply the edits; see `sluice.kernels.penalties.apply_penalties`."""
    at = (penalties.rows.long(), penalties.token_ids.long())
    values = logits[at] + penalties.bias
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    values -= penalties.frequency * penalties.counts + penalties.presence * (penalties.counts > 0)
    logits[at] = values
