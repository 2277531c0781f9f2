"""Weights of a folder of safetensors whose matrices are quantized in a published format."""

from collections import Counter
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.safetensors_weights import SafetensorsWeights
from sluice.engine.quantized.matrix import StoredMatrix
from sluice.engine.quantized.source import Format
from sluice.kernels.linear.stored import CodedWeight
from sluice.kernels.linear.words import WordForm

_WEIGHT = ".weight"


class QuantizedWeights:
    """Weights in a format, and others as they are. See `Weights`."""

    def __init__(self, tensors: SafetensorsWeights, stored_format: Format, *, keeps_float8: bool = False) -> None:
        self._tensors = tensors
        self._format = stored_format
        self._keeps_float8 = keeps_float8

    def with_float8(self) -> "QuantizedWeights":
        """See `Weights`."""
        return QuantizedWeights(self._tensors, self._format, keeps_float8=True)

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, in order of name."""
        return self._tensors.files

    @property
    def description(self) -> str:
        """What the config states."""
        return self._format.description

    @property
    def packed_bytes(self) -> int:
        """What the matrices take that products multiply as they are."""
        return sum(map(self._packed_bytes, self._matrices.values()))

    @property
    def packed_elements(self) -> int:
        """Their elements."""
        return sum(prod(matrix.shape) for matrix in self._matrices.values() if self._packed_bytes(matrix))

    @property
    def word_forms(self) -> frozenset[WordForm]:
        """See `Weights`."""
        kept = [matrix for matrix in self._matrices.values() if self._packed_bytes(matrix)]
        return frozenset(form for matrix in kept if (form := matrix.word_form) is not None)

    @property
    def dequantized(self) -> str:
        """See `Weights`."""
        reasons = Counter(matrix.reason for matrix in self._matrices.values() if not self._packed_bytes(matrix))
        return ", ".join(f"{count} matrices {reason}" for reason, count in reasons.items())

    def header_bytes(self, file: Path) -> int:
        """See `Weights`."""
        return self._tensors.header_bytes(file)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `Weights`."""
        matrix = self._matrix(name, shape)
        return self._tensors.get(name, shape) if matrix is None else matrix.dequantized(dtype or torch.float32)

    def stored(self, name: str) -> Tensor:
        """See `Weights`."""
        return self._tensors.stored(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> CodedWeight | None:
        """See `Weights`."""
        matrix = self._matrix(name, shape)
        if matrix is None:
            return None
        return matrix.float8() if self._keeps_float8 and matrix.is_float8 else matrix.packed()

    def num_rows(self, name: str) -> int:
        """See `Weights`."""
        matrix = self._matrices.get(name.removesuffix(_WEIGHT))
        return self._tensors.num_rows(name) if matrix is None else matrix.shape[0]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored; bfloat16 if it is quantized."""
        return torch.bfloat16 if name.removesuffix(_WEIGHT) in self._matrices else self._tensors.dtype_of(name)

    def _packed_bytes(self, matrix: StoredMatrix) -> int:
        return matrix.float8_bytes if self._keeps_float8 and matrix.is_float8 else matrix.packed_bytes

    @cached_property
    def _matrices(self) -> dict[str, StoredMatrix]:
        """The quantized matrices by the names of their modules."""
        modules = dict.fromkeys(name.rpartition(".")[0] for name in self._tensors.names)
        found = {module: self._format.matrix(self._tensors, module) for module in modules}
        return {module: matrix for module, matrix in found.items() if matrix is not None}

    def _matrix(self, name: str, shape: tuple[int, ...]) -> StoredMatrix | None:
        matrix = self._matrices.get(name.removesuffix(_WEIGHT)) if name.endswith(_WEIGHT) else None
        if matrix is not None and matrix.shape != shape:
            raise ModelFolderError(f"tensor {name!r} is {matrix.shape}, config.json expects {shape}.")
        return matrix
