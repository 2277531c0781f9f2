"""Rows of a packed weight against the dequantized one, for each instruction set that this machine runs."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import pytest
import torch

from sluice.kernels.embedding import embed
from sluice.kernels.linear.int8 import rounded_to_int8
from sluice.kernels.linear.native import NativeLinear
from tests.kernels.test_cpu_grouped import FORMS, packed_as, tensors

IDS = [0, 31, 32, 96, 5, 5, 64]


def embedded(weight: NativeLinear | torch.Tensor, ids: list[int], width: int) -> torch.Tensor:
    out = torch.empty(len(ids), width, dtype=torch.bfloat16)
    embed(weight, torch.tensor(ids), out=out)
    return out


@pytest.mark.usefixtures("native_path")
class TestGivenAPackedEmbedding:
    @pytest.mark.parametrize("form", FORMS)
    def test_when_rows_are_read_then_they_are_those_of_the_dequantized_weight(self, form: str) -> None:
        _, weight, _ = tensors(0, (97, 256))
        packed = packed_as(form, weight)

        actual = embedded(NativeLinear(packed, None), IDS, 256)

        assert torch.equal(actual, packed.dequantized(torch.bfloat16)[IDS])

    def test_when_it_is_in_int8_then_rows_are_those_of_the_dequantized_weight(self) -> None:
        _, weight, _ = tensors(0, (97, 192))
        packed = rounded_to_int8(weight)

        actual = embedded(NativeLinear(packed, None), IDS, 192)

        assert torch.equal(actual, packed.dequantized(torch.bfloat16)[IDS])

    def test_when_it_is_in_bfloat16_then_rows_are_its_own(self) -> None:
        _, weight, _ = tensors(0, (97, 192))

        actual = embedded(NativeLinear(weight, None), IDS, 192)

        assert torch.equal(actual, weight[IDS])

    def test_when_many_rows_are_read_by_several_threads_then_each_is_in_its_place(self) -> None:
        _, weight, _ = tensors(0, (97, 64))
        ids = [i * 7 % 97 for i in range(200)]

        assert torch.equal(embedded(NativeLinear(weight, None), ids, 64), weight[ids])

    def test_when_it_is_a_table_then_rows_are_its_own(self) -> None:
        _, weight, _ = tensors(0, (97, 64))

        assert torch.equal(embedded(weight, IDS, 64), weight[IDS])
