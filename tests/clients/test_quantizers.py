"""Matrices that GPTQModel packs, and folders of LLM Compressor, are read as the numbers that they stand for."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sluice.engine.models.folder import open_model_folder
from tests.clients.environments import python_client
from tests.engine.quantized.test_formats import read

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.clients]


class TestGivenMatricesOfGptqModel:
    def test_when_they_are_read_then_their_numbers_are_its_own(self, tmp_path: Path) -> None:
        written = python_client("gptqmodel").run(str(tmp_path))

        assert len(written) == 34
        for case in written:
            tensors = load_file(tmp_path / case["name"])
            numbers = tensors.pop("numbers")
            matrix = read(case["config"], tensors)
            assert matrix is not None
            packed = matrix.packed()
            assert packed is not None
            # It multiplies in float16.
            assert torch.equal(matrix.dequantized(torch.float32).half(), numbers), case["name"]
            assert torch.equal(packed.dequantized(torch.float32).half(), numbers), case["name"]


class TestGivenFoldersOfLlmCompressor:
    def test_when_they_are_read_then_their_numbers_are_those_that_transformers_reads(self, tmp_path: Path) -> None:
        written = python_client("llmcompressor").run(str(tmp_path))

        assert len(written) == 8
        for case in written:
            weights = open_model_folder(tmp_path / case["name"]).weights
            numbers = load_file(tmp_path / case["name"] / "numbers")
            assert len(numbers) == 7
            for name, expected in numbers.items():
                assert torch.equal(weights.get(name, tuple(expected.shape)), expected), (case, name)
                packed = weights.packed(name, tuple(expected.shape))
                assert (packed is None) == case["name"].startswith("fp8")
                assert packed is None or torch.equal(packed.dequantized(torch.float32), expected), (case, name)
