"""Packed tensors against the `gguf` package: the same numbers to the bit where the groups are the file's."""

# The package's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import numpy as np
import pytest
import torch

from sluice.engine.gguf.grouped import grouped_tensor
from sluice.engine.gguf.types import BLOCKS, TensorType
from sluice.kernels.linear.grouped import GROUP

gguf = pytest.importorskip("gguf")
from tests.engine.gguf.test_dequantize import random_blocks  # noqa: E402 - it needs the package

EXACT = {
    TensorType.Q4_0: 4,
    TensorType.Q4_1: 4,
    TensorType.Q4_K: 4,
    TensorType.Q5_0: 8,
    TensorType.Q8_0: 8,
    TensorType.MXFP4: 8,
}
ROUNDED = [TensorType.Q5_1, TensorType.Q5_K, TensorType.Q6_K]


def expected(stored: np.ndarray, kind: TensorType) -> torch.Tensor:
    return torch.from_numpy(np.array(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(kind))))


class TestGivenBlocks:
    @pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
    def test_when_they_are_packed_then_numbers_are_those_of_the_package(self, kind: TensorType) -> None:
        stored = random_blocks(kind, 5, 3)

        packed = grouped_tensor(torch.from_numpy(stored.reshape(-1).copy()), kind, (5, 3 * BLOCKS[kind][0]))

        assert packed is not None
        assert packed.num_bits == EXACT[kind]
        assert torch.equal(packed.dequantized(torch.float32), expected(stored, kind))

    @pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.name)
    def test_when_groups_cannot_hold_them_then_each_is_within_half_a_step_of_eight_bits(self, kind: TensorType) -> None:
        stored = random_blocks(kind, 5, 3)

        packed = grouped_tensor(torch.from_numpy(stored.reshape(-1).copy()), kind, (5, 3 * BLOCKS[kind][0]))

        assert packed is not None
        exact = expected(stored, kind)
        largest = exact.abs().unflatten(1, (-1, GROUP)).amax(dim=2, keepdim=True)
        errors = (packed.dequantized(torch.float32) - exact).abs().unflatten(1, (-1, GROUP))
        assert bool((errors <= largest / 250).all())

    def test_when_a_type_has_no_blocks_then_nothing_is_packed(self) -> None:
        assert grouped_tensor(torch.zeros(64, dtype=torch.uint8), TensorType.F16, (1, 32)) is None
