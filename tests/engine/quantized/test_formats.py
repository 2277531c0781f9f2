"""Matrices in each published format against the numbers that they were written for, and what is wrong with others."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from itertools import repeat

import pytest
import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.quantized.config import format_of
from sluice.engine.quantized.matrix import StoredMatrix
from sluice.engine.quantized.source import Form
from tests.engine.quantized.writing import Scheme, awq, compressed, fp8, gptq

INT4: dict[str, object] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8: dict[str, object] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8: dict[str, object] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BLOCK: dict[str, object] = {**FP8, "strategy": "block", "block_structure": [128, 128]}
DYNAMIC: dict[str, object] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

WRITTEN_HERE: dict[str, Scheme] = {
    "gptq": gptq(),
    "gptq, version 2": gptq(version=2),
    "gptq, symmetric, groups of 64": gptq(group=64, symmetric=True),
    "gptq, whole rows": gptq(group=-1),
    "gptq, 8 bits": gptq(bits=8),
    "awq": awq(),
    "awq, groups of 64": awq(64),
    "awq, whole rows": awq(-1),
    "gptq, groups in an order": gptq(orders=repeat(2)),
    "gptq, groups of 16": gptq(group=16),
    "fp8": fp8(),
}
BY_THE_PACKAGE: dict[str, tuple[str, Mapping[str, object], torch.dtype]] = {
    "4 bits": ("pack-quantized", INT4, torch.bfloat16),
    "4 bits, with zeros": ("pack-quantized", {**INT4, "symmetric": False}, torch.float16),
    "4 bits, by row": ("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}, torch.float32),
    "4 bits, by row, with zeros": (
        "pack-quantized",
        {**INT4, "strategy": "channel", "group_size": None, "symmetric": False},
        torch.bfloat16,
    ),
    "8 bits in words": ("pack-quantized", {**INT4, "num_bits": 8, "group_size": 128}, torch.bfloat16),
    "8 bits in words, with zeros": ("pack-quantized", {**INT4, "num_bits": 8, "symmetric": False}, torch.bfloat16),
    "int8": ("int-quantized", INT8, torch.bfloat16),
    "int8, with zeros": ("int-quantized", {**INT8, "symmetric": False}, torch.bfloat16),
    "int8 by tensor": ("int-quantized", {**INT8, "strategy": "tensor"}, torch.float32),
    "fp8 by row": ("float-quantized", FP8, torch.bfloat16),
    "fp8 by tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, torch.float32),
    "fp8 by block": ("float-quantized", BLOCK, torch.bfloat16),
}
IN_NO_PRODUCT = {
    "gptq, groups of 16": "in groups of 16",
    "fp8": "in FP8",
    "fp8 by row": "in FP8",
    "fp8 by tensor": "in FP8",
    "fp8 by block": "in FP8",
}
SHAPES = [(64, 128), (200, 384)]


class Tensors:
    """The tensors of a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {f"m.{name}": tensor for name, tensor in tensors.items()}

    def form_of(self, name: str) -> Form | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else (tensor.dtype, tuple(tensor.shape))

    def stored(self, name: str) -> Tensor:
        return self._tensors[name]


def weight_of(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.1


def read(config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> StoredMatrix | None:
    stored_format = format_of({"quantization_config": config})
    assert stored_format is not None
    return stored_format.matrix(Tensors(tensors), "m")


def check(scheme: Scheme, shape: tuple[int, int], name: str) -> StoredMatrix:
    """Compare a matrix with the numbers that it was written for, to the bit."""
    written = scheme.write(weight_of(shape))
    matrix = read(scheme.config, written.tensors)
    assert matrix is not None
    assert matrix.shape == shape
    assert torch.equal(matrix.dequantized(torch.float32), written.numbers)
    assert torch.equal(matrix.dequantized(torch.bfloat16), written.numbers.bfloat16())
    packed = matrix.packed()
    assert matrix.reason == IN_NO_PRODUCT.get(name, "")
    if name in IN_NO_PRODUCT:
        assert packed is None
        assert matrix.packed_bytes == 0
    else:
        assert packed is not None
        assert torch.equal(packed.dequantized(torch.float32), written.numbers)
    return matrix


class TestGivenAMatrixWrittenFromAFormatsDescription:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", WRITTEN_HERE)
    def test_when_it_is_read_then_its_numbers_are_those_that_were_written(
        self, name: str, shape: tuple[int, int]
    ) -> None:
        check(WRITTEN_HERE[name], shape, name)

    def test_when_rows_are_read_a_few_at_a_time_then_none_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sluice.engine.quantized.matrix._ROWS_ELEMENTS", 1)

        for name in ("gptq", "awq", "fp8", "gptq, groups in an order"):
            check(WRITTEN_HERE[name], (264, 128), name)

    def test_when_its_groups_have_several_sizes_then_it_is_not_packed(self) -> None:
        written = GPTQ.write(weight_of((64, 128)))
        groups = written.tensors["g_idx"].clone()
        groups[:40] = 0  # 32 of the first group's, and 8 of the second's

        matrix = read(GPTQ.config, {**written.tensors, "g_idx": groups})

        assert matrix is not None
        assert (matrix.packed(), matrix.reason) == (None, "in groups of several sizes")

    @pytest.mark.parametrize("bits", [4, 8])
    def test_when_zeros_of_0_are_stored_less_one_then_they_are_read_though_they_borrow(self, bits: int) -> None:
        """Some writers subtract one from each code of a word at once."""
        weight = weight_of((64, 128))
        weight[::3] = weight[::3].abs()
        scheme = gptq(bits=bits)
        written = scheme.write(weight)

        matrix = read(scheme.config, written.tensors)

        assert matrix is not None
        assert torch.equal(matrix.dequantized(torch.float32), written.numbers)


class TestGivenAMatrixOfCompressedTensors:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", BY_THE_PACKAGE)
    def test_when_it_is_read_then_its_numbers_are_those_of_its_package(self, name: str, shape: tuple[int, int]) -> None:
        stored, weights, scale_dtype = BY_THE_PACKAGE[name]

        check(compressed(stored, weights, scale_dtype=scale_dtype), shape, name)

    def test_when_rows_of_x_are_in_int8_too_then_the_product_is_that_of_int8(self) -> None:
        matrix = check(compressed("int-quantized", INT8, activations=DYNAMIC), (64, 128), "W8A8")

        assert matrix.product == "int8"
        assert matrix.packed_bytes == 64 * 128 + 64 * 4


GPTQ = gptq()
SMALL = GPTQ.write(weight_of((64, 128))).tensors


class TestGivenTensorsThatDoNotBelongTogether:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"qweight": torch.zeros(16, 64)}, "'m.qweight' is float32 .* expected int32"),
            ({"qweight": torch.zeros(16, dtype=torch.int32)}, "expected int32 of 2 dimensions"),
            ({"qweight": torch.zeros(0, 64, dtype=torch.int32)}, "expected int32 of 2 dimensions"),
            ({"qweight": torch.zeros(15, 64, dtype=torch.int32)}, "'m.g_idx' is .*expect"),
            ({"scales": torch.zeros(3, 64)}, "'m.scales' is .*expect"),
            ({"scales": torch.zeros(4, 64, dtype=torch.int32)}, "'m.scales' is int32"),
            ({"qzeros": torch.zeros(4, 9, dtype=torch.int32)}, "'m.qzeros' is .*expect"),
            ({"g_idx": torch.full((128,), 4, dtype=torch.int32)}, "names groups that its matrix does not have"),
            ({"g_idx": torch.zeros(128)}, "'m.g_idx' is float32"),
        ],
    )
    def test_when_they_are_read_then_a_sentence_names_the_tensor(
        self, changes: Mapping[str, Tensor], message: str
    ) -> None:
        with pytest.raises(ModelFolderError, match=message):
            read(GPTQ.config, {**SMALL, **changes})

    @pytest.mark.parametrize("name", ["scales", "qzeros"])
    def test_when_one_is_missing_then_a_sentence_names_it(self, name: str) -> None:
        with pytest.raises(ModelFolderError, match=f"'m.{name}'"):
            read(GPTQ.config, {each: tensor for each, tensor in SMALL.items() if each != name})

    def test_when_a_module_is_not_quantized_then_it_has_no_matrix(self) -> None:
        plain = {"weight": torch.zeros(8, 8)}

        for scheme in (GPTQ, awq(), fp8()):
            assert read(scheme.config, plain) is None


class TestGivenAConfig:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not read; awq, compressed-tensors"),
            ({"bits": 4}, "quant_method 'None'"),
            ({"quant_method": "gptq"}, "bits must be 4 or 8, got None"),
            ({"quant_method": "gptq", "bits": 3}, "bits must be 4 or 8, got 3"),
            ({"quant_method": "gptq", "bits": True}, "bits must be 4 or 8, got True"),
            ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be"),
            ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "group_size must be"),
            ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "Marlin"),
            ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq or gptq_v2"),
            ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' of AWQ"),
            ({"quant_method": "awq", "zero_point": False}, "without zero_point"),
            ({"quant_method": "fp8", "weight_block_size": [128]}, "two whole numbers"),
            ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be e4m3"),
            ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "is not one of pack-quantized"),
            ({"config_groups": {"group_0": ["Linear"]}}, "group_0 must be an object"),
            ({"config_groups": {}, "transform_config": {"a": 1}}, "transform_config is not supported"),
        ],
    )
    def test_when_it_states_what_is_not_read_then_a_sentence_says_so(
        self, config: Mapping[str, object], message: str
    ) -> None:
        with pytest.raises(ModelFolderError, match=message):
            format_of({"quantization_config": config})

    def test_when_it_states_none_then_there_is_none(self) -> None:
        assert format_of({"quantization_config": None}) is None
