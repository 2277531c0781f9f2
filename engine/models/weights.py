"""Where a model's tensors come from, by their names in transformers."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sluice.kernels.linear.stored import CodedWeight
from sluice.kernels.linear.words import WordForm

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Those that a model computes in."""


HEAD = "score.weight"
"""The head of a model that classifies."""


class Weights(Protocol):
    """Tensors by name."""

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, in order of name."""
        ...

    @property
    def description(self) -> str:
        """How they are stored, for people; empty if their dtype says it."""
        ...

    @property
    def packed_bytes(self) -> int:
        """What the matrices take that products multiply as they are stored, in 4 or 8 bits; 0 without such."""
        ...

    @property
    def packed_elements(self) -> int:
        """Their elements."""
        ...

    @property
    def word_forms(self) -> frozenset[WordForm]:
        """The forms in which a GPU's products read them."""
        ...

    @property
    def dequantized(self) -> str:
        """Which quantized matrices no product multiplies as they are, and why, for people; empty without such."""
        ...

    def with_float8(self) -> "Weights":
        """Return these weights for a device that multiplies in FP8: matrices in it are packed, too."""
        ...

    def header_bytes(self, file: Path) -> int:
        """Bytes of a file before its tensors."""
        ...

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor: as it is stored, or dequantized to `dtype` (None: float32).

        Raises:
            ModelFolderError: it is missing, corrupt, or not of `shape`.
        """
        ...

    def stored(self, name: str) -> Tensor:
        """Return a tensor as it is stored, whatever its dtype and shape.

        Raises:
            ModelFolderError: it is missing or corrupt, or a tensor of this file has no such form.
        """
        ...

    def packed(self, name: str, shape: tuple[int, ...]) -> CodedWeight | None:
        """Return a matrix in the form that it is stored in; None if it is plain, or no product multiplies it so.

        Raises:
            ModelFolderError: as `get`.
        """
        ...

    def num_rows(self, name: str) -> int:
        """Return the first size of a tensor; 0 if there is none of that name."""
        ...

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored; bfloat16 if it is quantized."""
        ...
