"""Blocks of every type against the `gguf` package, to the bit."""

# The package's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import numpy as np
import pytest
import torch

from sluice.engine.gguf.dequantize import dequantize_into
from sluice.engine.gguf.types import BLOCKS, TensorType

gguf = pytest.importorskip("gguf")


def random_blocks(kind: TensorType, num_rows: int, num_blocks: int) -> np.ndarray:
    """Any codes, with scales that are numbers."""
    size, num_bytes = BLOCKS[kind]
    generator = np.random.default_rng(3)
    if kind in (TensorType.F32, TensorType.F16, TensorType.BF16):
        numbers = generator.standard_normal((num_rows, num_blocks * size), dtype=np.float32)
        return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType(kind)).view(np.uint8)
    blocks = generator.integers(0, 256, (num_rows, num_blocks, num_bytes), dtype=np.uint8)
    scales = generator.standard_normal((num_rows, num_blocks, 2)).astype(np.float16).view(np.uint8)
    at = num_bytes - 2 if kind == TensorType.Q6_K else 0
    end = (
        min(at + 4, num_bytes)
        if kind in (TensorType.Q4_K, TensorType.Q5_K, TensorType.Q4_1, TensorType.Q5_1)
        else at + 2
    )
    if kind == TensorType.MXFP4:
        # Powers of two that float16 has, too.
        blocks[:, :, 0] = generator.integers(104, 144, (num_rows, num_blocks), dtype=np.uint8)
    else:
        blocks[:, :, at:end] = scales[:, :, : end - at]
    return blocks.reshape(num_rows, -1)


class TestGivenBlocks:
    @pytest.mark.parametrize("kind", list(TensorType), ids=lambda kind: kind.name)
    def test_when_they_are_dequantized_then_bits_are_those_of_the_package(self, kind: TensorType) -> None:
        stored = random_blocks(kind, 5, 3)
        out = torch.empty(5, 3 * BLOCKS[kind][0])

        dequantize_into(out, torch.from_numpy(stored.reshape(-1).copy()), kind)

        expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(kind))
        assert torch.equal(out, torch.from_numpy(np.array(expected)).view(out.shape))

    def test_when_a_dtype_is_narrower_then_each_number_is_rounded_once(self) -> None:
        stored = random_blocks(TensorType.Q6_K, 3, 2)
        wide, narrow = torch.empty(3, 512), torch.empty(3, 512, dtype=torch.bfloat16)

        for out in (wide, narrow):
            dequantize_into(out, torch.from_numpy(stored.reshape(-1).copy()), TensorType.Q6_K)

        assert torch.equal(narrow, wide.bfloat16())
