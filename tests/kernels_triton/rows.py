"""Rows that products of packed weights are tested with."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor

from tests.oracles.kernel_cases import generator_on, random_tensor


def rows_and_bias(num_tokens: int, shape: torch.Size, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor | None]:
    """Rows `[T, K]` in a slice of a wider buffer, so that what lies next to a row is not read; a bias if T is odd."""
    generator = generator_on(device, num_tokens)
    out_size, in_size = shape
    x = random_tensor(num_tokens, in_size + 3, dtype=dtype, generator=generator)
    x[:, in_size:] = float("nan")
    bias = random_tensor(out_size, dtype=dtype, generator=generator) if num_tokens % 2 else None
    return x[:, :in_size], bias
