"""A whole engine over the interpreted kernels, whose weights stay packed: the tokens of their dequantized numbers."""

from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from benchmarks.gpu.models import triton_in_place_of_cpu
from sluice.engine.request import Request, Sampling
from sluice.kernels.linear.cuda import Float8Linear, PackedLinear
from sluice.kernels.linear.float8 import float8_linear_reference
from tests.engine.quantized.test_formats import BLOCK, DYNAMIC, FP8, INT4, INT8
from tests.engine.quantized.writing import awq, compressed, fp8, gptq, write_folders
from tests.grids import fast_only
from tests.oracles.adapters import save_adapter
from tests.oracles.engines import run
from tests.oracles.tiny_models import TinyModel

SCHEMES = {
    "awq": lambda: awq(64),
    "gptq, 8 bits": lambda: gptq(bits=8, symmetric=True),
    "gptq, groups in an order": lambda: gptq(orders=repeat(2)),
    "W4A16": lambda: compressed("pack-quantized", INT4),
    "W8A8": lambda: compressed("int-quantized", INT8, activations=DYNAMIC),
}
FLOAT8_SCHEMES = {
    "fp8": fp8,
    "FP8 by row": lambda: compressed("float-quantized", FP8, activations={**DYNAMIC, "type": "float"}),
    "FP8 by block": lambda: compressed("float-quantized", BLOCK, activations={**DYNAMIC, "type": "float"}),
}
SIZES: Mapping[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Whose rows are whole groups."""

PROMPTS = ((5, 9, 40), (17, 3, 2, 80, 61, 9, 33))


def tokens_of(
    folder: Path, *, keeps_packed: bool, adapters: Path | None = None
) -> tuple[Mapping[tuple[str, int], list[int]], int]:
    """Greedy tokens of the interpreted kernels, and how many packed weights the model has."""
    asked = [
        Request(
            id=str(number),
            prompt_token_ids=prompt,
            adapter="one" if adapters and number else "",
            sampling=Sampling(temperature=0, max_tokens=3, ignore_eos=True),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    made: list[PackedLinear] = []

    def note(linear: PackedLinear, *args: object) -> None:
        made.append(linear)
        initialise(linear, *args)  # pyright: ignore[reportArgumentType] - its own arguments

    initialise = PackedLinear.__init__
    with triton_in_place_of_cpu(), patch.object(PackedLinear, "__init__", note):
        outcome = run(
            folder, asked, dtype="float16", quantization="auto" if keeps_packed else "none", adapters=adapters
        )
    return outcome.token_ids, len(made)


def first_logprobs(folder: Path) -> list[dict[int, float]]:
    """Log-probabilities of the first token of two prompts."""
    asked = [
        Request(
            id=str(number),
            prompt_token_ids=prompt,
            sampling=Sampling(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    with triton_in_place_of_cpu():
        outcome = run(folder, asked, dtype="float16", quantization="auto")
    return [dict(outcome.logprobs[str(number), 0][0].top) for number in range(len(PROMPTS))]


class TestGivenAFolderOfPackedWeights:
    @pytest.mark.parametrize("scheme", fast_only(["awq"], [name for name in SCHEMES if name != "awq"]))
    def test_when_they_stay_packed_then_tokens_are_those_of_their_numbers(self, scheme: str, tmp_path: Path) -> None:
        TinyModel("llama", SIZES).save(tmp_path / "plain")
        folder, _ = write_folders(tmp_path / "plain", SCHEMES[scheme](), tmp_path)
        expected, num_none = tokens_of(folder, keeps_packed=False)

        found, num_packed = tokens_of(folder, keeps_packed=True)

        assert found == expected
        assert (num_none, num_packed) == (0, 4)

    @pytest.mark.long
    def test_when_a_request_has_an_adapter_then_tokens_are_those_of_their_numbers(self, tmp_path: Path) -> None:
        TinyModel("llama", SIZES).save(tmp_path / "plain")
        folder, _ = write_folders(tmp_path / "plain", SCHEMES["awq"](), tmp_path)
        save_adapter(tmp_path / "adapters" / "one", tmp_path / "plain", rank=3, seed=1, std=0.3)
        expected, _ = tokens_of(folder, keeps_packed=False, adapters=tmp_path / "adapters")

        found, num_packed = tokens_of(folder, keeps_packed=True, adapters=tmp_path / "adapters")

        assert found == expected
        assert num_packed == 4
        assert found[("1", 0)] != tokens_of(folder, keeps_packed=True)[0][("1", 0)]

    @pytest.mark.long
    @pytest.mark.parametrize("scheme", FLOAT8_SCHEMES)
    def test_when_they_are_in_fp8_then_logprobs_are_near_those_of_its_definition(
        self, scheme: str, tmp_path: Path
    ) -> None:
        """Sums in another order may round an element of the next rows otherwise, by a sixteenth of it."""

        def defined(linear: Float8Linear, x: Tensor) -> Tensor:
            made.append(linear)
            return float8_linear_reference(x, linear.weight, linear.bias)

        made: list[Float8Linear] = []
        TinyModel("llama", SIZES).save(tmp_path / "plain")
        folder, _ = write_folders(tmp_path / "plain", FLOAT8_SCHEMES[scheme](), tmp_path)
        with patch.object(Float8Linear, "__call__", defined):
            expected = first_logprobs(folder)

        found = first_logprobs(folder)

        assert made
        for one, other in zip(found, expected, strict=True):
            assert len(one.keys() & other.keys()) >= 15
            assert max(abs(one[token] - other[token]) for token in one.keys() & other.keys()) < 0.03

    @pytest.mark.long
    @pytest.mark.parametrize("stored", ["Q4_0", "Q8_0", "Q4_1"])
    def test_when_it_is_a_gguf_then_tokens_are_those_of_its_numbers(self, stored: str, tmp_path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        from tests.engine.gguf.writing import write_model

        TinyModel("llama", {**SIZES}).save(tmp_path / "plain")
        write_model(tmp_path / "plain", tmp_path / "model.gguf", gguf.GGMLQuantizationType[stored], {})
        expected, _ = tokens_of(tmp_path / "model.gguf", keeps_packed=False)

        found, num_packed = tokens_of(tmp_path / "model.gguf", keeps_packed=True)

        assert found == expected
        # The output, too.
        assert num_packed == 5
