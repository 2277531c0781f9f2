"""The types of tensors that are read, and their blocks."""

from collections.abc import Mapping
from enum import IntEnum


class TensorType(IntEnum):
    """Types by their number in a file. Q4_K_M, Q5_K_M and others are mixtures of them."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    MXFP4 = 39


BLOCKS: Mapping[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.MXFP4: (32, 17),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
}
"""Elements of a block, and its bytes."""

_OTHERS = {10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 20: "IQ4_NL", 23: "IQ4_XS"}


def type_name(number: int) -> str:
    """Return the name of a type that is not read."""
    return _OTHERS.get(number, f"of type {number}")
