"""Definition of penalties: a loop over the tokens of one row."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


def penalties_reference(
    row: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> Tensor:
    """Return the penalised logits `row` `[V]` of a sequence with this prompt and output, in float64."""
    result = row.to(torch.float64, copy=True)
    counts = Counter(output)
    for token in set(prompt) | set(output):
        value = float(row[token])
        value = value / repetition if value > 0 else value * repetition
        result[token] = value - frequency * counts[token] - presence * (counts[token] > 0)
    return result
