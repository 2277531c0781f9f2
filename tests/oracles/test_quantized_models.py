"""Models in the published formats against transformers, on the numbers that their files stand for."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import LoadPlan, plan_load
from sluice.engine.models import load as load_module
from sluice.engine.models.config import parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.request import Request, Sampling
from sluice.kernels.experts import Mixture
from sluice.kernels.linear.native import Kind, NativeLinear
from sluice.kernels.linear.words import FLOAT8_CODES, WordForm
from tests.engine.quantized.test_formats import BLOCK, DYNAMIC, FP8, INT4, INT8
from tests.engine.quantized.writing import Scheme, awq, compressed, fp8, gptq, write_folders
from tests.oracles.engines import run
from tests.oracles.test_decoder_logits import LENGTHS, load, logits_of
from tests.oracles.test_decoder_step import QWEN3_MOE_NATIVE
from tests.oracles.tiny_models import VOCAB_SIZE, TinyModel

CPU = torch.device("cpu")
SIZES: dict[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Whose rows are whole groups."""

SCHEMES: dict[str, tuple[Callable[[], Scheme], Kind]] = {
    "gptq": (lambda: gptq(group=64), Kind.SPANS4),
    "gptq, 8 bits": (lambda: gptq(bits=8, symmetric=True), Kind.SPANS8),
    "gptq, groups in an order": (lambda: gptq(orders=repeat(2)), Kind.SPANS4),
    "awq": (lambda: awq(64), Kind.SPANS4),
    "fp8": (fp8, Kind.BF16),
    "W4A16": (lambda: compressed("pack-quantized", INT4), Kind.SPANS4),
    "W8A8": (lambda: compressed("int-quantized", INT8, activations=DYNAMIC), Kind.INT8),
    "FP8 by row": (lambda: compressed("float-quantized", FP8), Kind.BF16),
    "FP8 by block": (lambda: compressed("float-quantized", BLOCK), Kind.BF16),
}
FAMILIES = {"llama": "gptq", "qwen3": "awq", "phi3": "gptq", "glm4": "awq", "gemma2": "W8A8"}
"""Fused and reordered projections, tied outputs, other gates."""


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def written(scheme: str, out: Path, family: str = "llama") -> tuple[Path, Path]:
    """A quantized folder, and one of its numbers."""
    TinyModel(family, SIZES).save(out / "plain")
    return write_folders(out / "plain", SCHEMES[scheme][0](), out)


def prompts_of() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


def transformers_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load_packed(path: Path) -> Decoder:
    folder = open_model_folder(path)
    form = WeightForm(torch.bfloat16, CPU, quantization="auto")
    if not form.keeps_packed:
        pytest.skip("this machine has no native products")
    return load_decoder(parse_config(folder.config), folder.weights, form=form, max_model_len=160, max_tokens=256)


def check_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Rows are rounded to 8 bits, and sums to bfloat16; small random models amplify both."""
    for mine, theirs in zip(actual, expected, strict=True):
        assert float((mine.float() - theirs).square().mean().sqrt()) < 0.1 * float(theirs.std())


class TestGivenATiedModel:
    """Its embedding is the output's weight."""

    @pytest.mark.parametrize("stored", ["bfloat16", "Q4_0", "Q8_0"])
    def test_when_both_share_the_packed_weight_then_logits_are_those_of_a_dequantized_table(
        self, stored: str, tmp_path: Path
    ) -> None:
        gguf = pytest.importorskip("gguf")
        from tests.engine.gguf.writing import write_model

        TinyModel("llama", SIZES | {"tie_word_embeddings": True}).save(tmp_path / "folder", torch.bfloat16)
        path = tmp_path / "folder"
        if stored != "bfloat16":
            TinyModel("llama", SIZES | {"tie_word_embeddings": True}).save(tmp_path / "wide")
            path = tmp_path / "model.gguf"
            write_model(tmp_path / "wide", path, gguf.GGMLQuantizationType[stored], {})
        decoder = load_packed(path)
        weights = decoder.weights
        assert weights.embedding is weights.output
        weight = open_model_folder(path).weights
        table = weight.get("model.embed_tokens.weight", (VOCAB_SIZE, 128), torch.bfloat16)
        with_table = Decoder(decoder.config, replace(weights, embedding=table), 256)

        actual = logits_of(decoder, prompts_of(), block_size=16, chunk=50)

        expected = logits_of(with_table, prompts_of(), block_size=16, chunk=50)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))
        decoder.forward = decoder.forward_by_operations
        by_operations = logits_of(decoder, prompts_of(), block_size=16, chunk=50)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, by_operations, strict=True))


class TestGivenAMixtureOfExperts:
    SCHEMES: Mapping[str, tuple[Callable[[], Scheme], Kind]] = {
        name: SCHEMES[name] for name in ("gptq", "gptq, 8 bits", "awq", "W4A16", "W8A8")
    } | {"gptq, each expert in an order of its own": (lambda: gptq(orders=count()), Kind.SPANS4)}

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_when_its_experts_stay_packed_then_the_native_step_is_its_operations_to_the_bit(
        self, scheme: str, tmp_path: Path
    ) -> None:
        write, kind = self.SCHEMES[scheme]
        TinyModel("qwen3_moe", QWEN3_MOE_NATIVE | SIZES).save(tmp_path / "plain")
        quantized, _ = write_folders(tmp_path / "plain", write(), tmp_path)
        prompts, decoder = prompts_of(), load_packed(quantized)

        actual = logits_of(decoder, prompts, block_size=16, chunk=50)

        assert decoder.has_native_step
        experts = [one for layer in decoder.weights.layers for one in cast("Mixture", layer.feed_forward).products]
        assert kind in {cast("NativeLinear", product).kind for product in experts}
        decoder.forward = decoder.forward_by_operations
        by_operations = logits_of(decoder, prompts, block_size=16, chunk=50)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, by_operations, strict=True))

    def test_when_one_of_its_experts_is_not_quantized_then_it_is_computed_all_the_same(self, tmp_path: Path) -> None:
        """A product of all experts takes weights of one form."""
        TinyModel("qwen3_moe", QWEN3_MOE_NATIVE | SIZES).save(tmp_path / "plain")
        quantized, numbers = write_folders(tmp_path / "plain", awq(64), tmp_path)
        name = "model.layers.1.mlp.experts.3.down_proj"
        tensors = load_file(quantized / "model.safetensors")
        kept = {each: tensor for each, tensor in tensors.items() if not each.startswith(f"{name}.")}
        plain = load_file(numbers / "model.safetensors")[f"{name}.weight"]
        save_file({**kept, f"{name}.weight": plain}, quantized / "model.safetensors")
        prompts, decoder = prompts_of(), load_packed(quantized)

        actual = logits_of(decoder, prompts, block_size=16, chunk=50)

        assert not decoder.has_native_step
        check_close(actual, logits_of(load(numbers, 160), prompts, block_size=16, chunk=50))


class TestGivenAQuantizedFolder:
    @pytest.mark.parametrize(
        ("scheme", "family"),
        [*((name, "llama") for name in SCHEMES), *((name, each) for each, name in FAMILIES.items())],
    )
    def test_when_it_is_computed_in_float32_then_logits_are_those_of_transformers_over_its_numbers(
        self, scheme: str, family: str, tmp_path: Path
    ) -> None:
        quantized, numbers = written(scheme, tmp_path, family)
        prompts, model = prompts_of(), transformers_of(numbers)

        actual = logits_of(load(quantized, 160), prompts, block_size=16, chunk=50)

        for prompt, logits in zip(prompts, actual, strict=True):
            torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("scheme", "family"),
        [*((name, "llama") for name in SCHEMES), *((name, each) for each, name in FAMILIES.items())],
    )
    def test_when_it_stays_packed_then_logits_are_close_to_those_of_its_numbers(
        self, scheme: str, family: str, tmp_path: Path
    ) -> None:
        quantized, numbers = written(scheme, tmp_path, family)
        prompts, decoder = prompts_of(), load_packed(quantized)

        actual = logits_of(decoder, prompts, block_size=16, chunk=50)

        layers = [product for product in decoder.weights.products[:-1] if isinstance(product, NativeLinear)]
        assert {product.kind for product in layers} == {SCHEMES[scheme][1]}
        assert decoder.has_native_step
        expected = logits_of(load(numbers, 160), prompts, block_size=16, chunk=50)
        check_close(actual, expected)

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_when_it_generates_then_its_tokens_are_those_of_transformers(self, scheme: str, tmp_path: Path) -> None:
        quantized, numbers = written(scheme, tmp_path)
        prompts, model = prompts_of(), transformers_of(numbers)
        sampling = Sampling(temperature=0, max_tokens=20, ignore_eos=True)
        requests = [
            Request(id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling) for i, prompt in enumerate(prompts)
        ]

        outcome = run(quantized, requests, dtype="float32")

        for i, prompt in enumerate(prompts):
            given = torch.tensor([prompt])
            generated = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=20, min_new_tokens=20, do_sample=False,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            assert outcome.token_ids[str(i), 0] == cast("list[int]", generated[0, len(prompt) :].tolist())

    def test_when_its_weights_are_kept_in_a_form_then_start_and_doctor_say_so(self, tmp_path: Path) -> None:
        quantized, _ = written("gptq", tmp_path)
        blocks, _ = written("FP8 by block", tmp_path / "blocks")
        forms = [
            WeightForm(torch.bfloat16, CPU, quantization="auto"),
            WeightForm(torch.float32, CPU, quantization="auto"),
        ]
        if not forms[0].keeps_packed:
            pytest.skip("this machine has no native products")

        says = [form.says(open_model_folder(quantized).weights) for form in forms]

        assert says == ["packed: 0 MiB in 4 and 8 bits", "dequantized at load to float32"]
        assert forms[0].says(open_model_folder(blocks).weights) == "dequantized at load to bfloat16: 21 matrices in FP8"
        assert open_model_folder(quantized).weights.description == "GPTQ, 4 bits in groups of 64"

    def test_when_it_is_for_a_gpu_then_its_products_take_16_bits_and_words(self, tmp_path: Path) -> None:
        weights = open_model_folder(written("awq", tmp_path)[0]).weights
        gpu = torch.device("cuda")
        forms = [WeightForm(dtype, gpu, quantization="auto") for dtype in (torch.bfloat16, torch.float16)]

        assert [form.says(weights) for form in forms] == ["packed: 0 MiB in 4 and 8 bits"] * 2
        assert weights.word_forms == {WordForm(num_bits=4, span=64, scales="float32")}
        assert WeightForm(torch.float32, gpu, quantization="auto").says(weights) == "dequantized at load to float32"
        assert not forms[0].keeps_table_packed

    @pytest.mark.parametrize("scheme", ["fp8", "FP8 by block", "FP8 by row"])
    def test_when_a_gpu_multiplies_fp8_then_it_stays_packed_if_its_rows_are_in_8_bits(
        self, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, _ = written(scheme, tmp_path)
        options = ModelOptions(path=folder, dtype="bfloat16")
        monkeypatch.setattr(WeightForm, "is_on_gpu", True)

        plans: list[LoadPlan] = []
        for has_it in (False, True):
            monkeypatch.setattr(load_module, "has_float8", Mock(return_value=has_it))
            plans.append(plan_load(options))

        dequantized = "dequantized at load to bfloat16: 21 matrices in FP8"
        # Those written by compressed-tensors here state no activations.
        kept = "packed: 0 MiB in 4 and 8 bits" if scheme == "fp8" else dequantized
        assert [plan.form.says(plan.folder.weights) for plan in plans] == [dequantized, kept]
        forms = {WordForm(8, 0, FLOAT8_CODES), WordForm(8, 128, FLOAT8_CODES)}
        assert [plan.word_forms for plan in plans] == [frozenset(), forms if scheme == "fp8" else frozenset()]
