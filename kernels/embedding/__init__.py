"""Rows of an embedding: of a table, or of a weight that stays packed and is dequantized row by row."""

from typing import TypeAlias

import torch
from torch import Tensor

from sluice.kernels.linear.native import NativeLinear

Embedding: TypeAlias = Tensor | NativeLinear
"""`[V, M]`: a table, or on the CPU a packed weight, which may be the output's, too."""


def embed(embedding: Embedding, ids: Tensor, *, out: Tensor) -> None:
    """Write the rows `ids` `[T]` int64 to `out` `[T, M]`; bfloat16 if they stay packed."""
    if isinstance(embedding, Tensor):
        torch.index_select(embedding, 0, ids, out=out)
    else:
        embedding.rows(ids, out=out)
