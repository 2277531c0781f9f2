"""The experts of gpt-oss in MXFP4 (OCP Microscaling Formats 1.0), dequantized when they are loaded.

A group of 32 elements of K has a scale, a power of two whose exponent is a byte less 127; an element is a sign, two
bits of exponent and one of mantissa. Two elements are a byte, the first in the low half.
"""

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.quantized.matrix import StoredMatrix
from sluice.engine.quantized.source import Source
from sluice.engine.text.json_files import Json

_SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_NUMBERS = torch.tensor([*_SIZES, *(-size for size in _SIZES)])
_GROUP = 32


class Mxfp4:
    """A folder whose experts are in MXFP4. See `Format`."""

    @property
    def description(self) -> str:
        """What becomes of them."""
        return "experts in MXFP4, dequantized at load"

    def matrix(self, source: Source, module: str) -> StoredMatrix | None:
        """None: each tensor has the matrices of all experts."""
        return None


def mxfp4_of(_: Json) -> Mxfp4:
    """Return the format."""
    return Mxfp4()


def mxfp4_matrix(name: str, blocks: Tensor, scales: Tensor, place: tuple[int, slice], shape: tuple[int, ...]) -> Tensor:
    """Return rows of a matrix `[N, K]` in float32.

    Args:
        name: for errors.
        blocks: `[E, N, K / 32, 16]` uint8.
        scales: `[E, N, K / 32]` uint8.
        place: which of E, and its rows.
        shape: (E, N, K), as the config has it.

    Raises:
        ModelFolderError: dtypes or shapes disagree.
    """
    groups = (*shape[:2], shape[2] // _GROUP)
    forms = {"blocks": (blocks, (*groups, _GROUP // 2)), "scales": (scales, groups)}
    for part, (tensor, expected) in forms.items():
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != expected or shape[2] % _GROUP:
            raise ModelFolderError(
                f"tensor {f'{name}_{part}'!r} is {tensor.dtype} {tuple(tensor.shape)}, expected uint8 {expected}."
            )
    halves = torch.stack([blocks[place] & 15, blocks[place] >> 4], dim=-1).flatten(-2)  # [N, K / 32, 32]
    exponents = scales[place].int() - 127
    return torch.ldexp(_NUMBERS[halves.int()], exponents[..., None]).flatten(1)
