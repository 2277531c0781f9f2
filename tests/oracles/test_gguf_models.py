"""Models in GGUF against the folders that they were converted from: the same config, and the same logits."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.engine.config import Quantization
from sluice.engine.errors import ModelFolderError
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import plan_load
from sluice.engine.execution.start.needs import needs_of
from sluice.engine.gguf.file import read_gguf
from sluice.engine.models.config import parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.request import Request, Sampling
from sluice.kernels.linear.native import Kind, NativeLinear
from tests.grids import cross_section
from tests.oracles.engines import run
from tests.oracles.test_decoder_logits import LENGTHS, load, logits_of
from tests.oracles.tiny_models import (
    COHERE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    QWEN3_MOE,
    TINY_MODELS,
    VOCAB_SIZE,
    TinyModel,
)

gguf = pytest.importorskip("gguf")
from tests.engine.gguf.writing import Experts, rounded_folder, write_model  # noqa: E402 - it needs the package

DEEP: dict[str, object] = {"num_hidden_layers": 7}
LOCAL: dict[str, object] = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
    }
}
# Of qwen3moe the format leaves out whether the shares of the chosen experts sum to one; of published models they do.
MIXTURES: dict[str, TinyModel] = {
    **{name: TINY_MODELS[name] for name in ("mixtral", "qwen2_moe", "granitemoe", "gpt_oss")},
    "qwen3_moe": TinyModel("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
}
CONVERTED: dict[str, TinyModel] = {
    **{name: TINY_MODELS[name] for name in ("llama", "llama-tied", "llama-biases", "llama-linear", "qwen2", "qwen3")},
    **{name: TINY_MODELS[name] for name in ("seed_oss", "gemma", "granite", "phi3", "olmo2", "glm4")},
    "cohere": TinyModel("cohere", COHERE | {"tie_word_embeddings": True}),
    # What the format leaves out is what the published models have.
    "cohere2": TinyModel("cohere2", {**COHERE, "tie_word_embeddings": True, "sliding_window": 11, **DEEP}),
    "exaone4": TinyModel("exaone4", {"sliding_window": 11, **DEEP}),
    "smollm3": TinyModel("smollm3", {"tie_word_embeddings": False, **DEEP}),
    "gemma2": TinyModel("gemma2", GEMMA2 | {"query_pre_attn_scalar": 16, **DEEP}),
    "gemma3": TinyModel(
        "gemma3_text", GEMMA3 | {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, **LOCAL, **DEEP}
    ),
    **MIXTURES,
}
"""Models of each architecture."""

SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# All experts are chosen: a rounded score chooses no other.
ALL_CHOSEN: dict[str, object] = {"num_experts_per_tok": 4}
OF_QWEN = {**ALL_CHOSEN, "num_experts": 4, "moe_intermediate_size": 64}
PACKED: dict[str, dict[str, object]] = {
    "mixtral": SIZES | {"num_local_experts": 4, **ALL_CHOSEN},
    "granitemoe": SIZES | GRANITE | {"num_local_experts": 4, **ALL_CHOSEN},
    "qwen2_moe": SIZES | {"shared_expert_intermediate_size": 32, **OF_QWEN},
    # Larger weights amplify the rounding of bfloat16 alone as much.
    "gpt_oss": GPT_OSS | SIZES | {"num_local_experts": 4, "initializer_range": 0.2, **ALL_CHOSEN},
    "qwen3_moe": SIZES | {"norm_topk_prob": True, **OF_QWEN},
    "llama": SIZES,
    "gemma3_text": GEMMA3 | SIZES | {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, **LOCAL, **DEEP},
}
"""Whose rows are whole groups of 32."""

FIELDS: dict[str, dict[str, Any]] = {
    "granite": {
        "{arch}.embedding_scale": 6.0,
        "{arch}.residual_scale": 0.22,
        "{arch}.attention.scale": 0.3,
        "{arch}.logit_scale": 5.0,
    },
    "cohere": {"{arch}.logit_scale": 0.3},
    "cohere2": {"{arch}.logit_scale": 0.3},
    "gemma2": {"{arch}.attn_logit_softcapping": 2.0, "{arch}.final_logit_softcapping": 3.0},
}
"""Fields of an architecture beyond the common ones."""

FIELDS["granitemoe"] = FIELDS["granite"]


def load_packed(file: Path) -> Decoder:
    folder = open_model_folder(file)
    form = WeightForm(torch.bfloat16, torch.device("cpu"), quantization="auto")
    if not form.keeps_packed:
        pytest.skip("this machine has no native products")
    return load_decoder(parse_config(folder.config), folder.weights, form=form, max_model_len=160, max_tokens=256)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class TestGivenAModelConvertedToGguf:
    @pytest.mark.parametrize("name", CONVERTED)
    def test_when_prompts_are_computed_then_logits_are_those_of_its_folder(self, name: str, tmp_path: Path) -> None:
        CONVERTED[name].save(tmp_path / "folder")
        file = tmp_path / "model.gguf"
        write_model(tmp_path / "folder", file, gguf.GGMLQuantizationType.F32, FIELDS.get(name, {}))
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]

        actual = logits_of(load(file, 160), prompts, block_size=16, chunk=50)

        expected = logits_of(load(tmp_path / "folder", 160), prompts, block_size=16, chunk=50)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(("name", "kind"), cross_section(list(PACKED), ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "MXFP4"]))
    def test_when_groups_stay_packed_then_logits_are_close_to_those_of_dequantized_weights(
        self, name: str, kind: str, tmp_path: Path
    ) -> None:
        """Rows are rounded to 8 bits, and sums to bfloat16; small random models amplify both."""
        TinyModel(name, PACKED[name]).save(tmp_path / "folder")
        file = tmp_path / "model.gguf"
        write_model(tmp_path / "folder", file, gguf.GGMLQuantizationType[kind], FIELDS.get(name, {}))
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
        decoder = load_packed(file)

        actual = logits_of(decoder, prompts, block_size=16, chunk=50)

        kinds = {product.kind for product in decoder.weights.products if isinstance(product, NativeLinear)}
        assert kinds == {Kind.GROUPS4 if kind in ("Q4_0", "Q4_1") else Kind.GROUPS8}
        assert decoder.has_native_step
        expected = logits_of(load(file, 160), prompts, block_size=16, chunk=50)
        for mine, theirs in zip(actual, expected, strict=True):
            spread = float(theirs.std())
            assert float((mine.float() - theirs).square().mean().sqrt()) < 0.1 * spread

    @pytest.mark.parametrize("experts", ["fused", "apart"])
    @pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss"])
    def test_when_its_experts_are_stored_otherwise_then_logits_are_the_same_to_the_bit(
        self, name: str, experts: Experts, tmp_path: Path
    ) -> None:
        TinyModel(name, PACKED[name]).save(tmp_path / "folder")
        stacked, other = tmp_path / "stacked.gguf", tmp_path / "other.gguf"
        write_model(tmp_path / "folder", stacked, gguf.GGMLQuantizationType.Q4_0, {})
        write_model(tmp_path / "folder", other, gguf.GGMLQuantizationType.Q4_0, {}, experts=experts)

        pairs = [(load(other, 160), load(stacked, 160)), (load_packed(other), load_packed(stacked))]
        for pair in pairs:
            actual, expected = (logits_of(decoder, [[*range(40)]], block_size=16, chunk=50)[0] for decoder in pair)

            assert torch.equal(actual, expected)

    def test_when_its_weights_are_kept_in_another_form_then_it_is_another_model(self, tmp_path: Path) -> None:
        """A job is resumed to the bit only by a worker that keeps them alike; start and doctor say how they are."""
        TinyModel("llama", PACKED["llama"]).save(tmp_path / "folder")
        file = tmp_path / "model.gguf"
        write_model(tmp_path / "folder", file, gguf.GGMLQuantizationType.Q4_1, {})
        forms: list[tuple[Quantization, torch.dtype]] = [
            ("auto", torch.bfloat16),
            ("none", torch.bfloat16),
            ("int4", torch.bfloat16),
            ("auto", torch.float32),
        ]
        if not WeightForm(torch.bfloat16, torch.device("cpu"), quantization="auto").keeps_packed:
            pytest.skip("this machine has no native products")

        folder = open_model_folder(file)
        plans = [
            plan_load(ModelOptions(path=file, quantization=quantization, dtype=str(dtype).removeprefix("torch.")))
            for quantization, dtype in forms
        ]
        schemes = [plan.form.scheme(folder.weights) for plan in plans]
        prints = {folder.fingerprint(plan.dtype, scheme=scheme) for plan, scheme in zip(plans, schemes, strict=True)}

        assert schemes == ["groups", "", "int4", ""]
        assert len(prints) == len(plans)
        # 20 bytes for each 32 elements.
        packed = (
            sum(math.prod(info.shape) for info in read_gguf(file).tensors.values() if len(info.shape) > 1) * 20 / 32
        )
        assert [plan.form.says(folder.weights) for plan in plans] == [
            f"packed: {packed / 2**20:.0f} MiB in 4 and 8 bits",
            "dequantized at load to bfloat16",
            "dequantized at load to int4",
            "dequantized at load to float32",
        ]

    def test_when_it_is_alone_in_a_folder_then_the_folder_is_it(self, tmp_path: Path) -> None:
        TINY_MODELS["llama"].save(tmp_path / "folder")
        (tmp_path / "one").mkdir()
        file = tmp_path / "one" / "model.gguf"
        write_model(tmp_path / "folder", file, gguf.GGMLQuantizationType.F16, {})

        folder = open_model_folder(tmp_path / "one")

        assert folder.path == file
        assert folder.dtype("auto") == torch.float16
        assert parse_config(folder.config).num_layers == 3


def prompts_of() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


class TestGivenAMixtureInGguf:
    @pytest.mark.parametrize(("name", "kind"), cross_section(list(MIXTURES), ["F32", "F16", "Q8_0", "Q4_0", "MXFP4"]))
    def test_when_it_is_computed_in_float32_then_logits_and_tokens_are_those_of_its_numbers(
        self, name: str, kind: str, tmp_path: Path
    ) -> None:
        TinyModel(name, {**PACKED[name], "num_experts_per_tok": 2}).save(tmp_path / "folder")
        file, stored = tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind]
        write_model(tmp_path / "folder", file, stored, FIELDS.get(name, {}))
        numbers, prompts = rounded_folder(tmp_path / "folder", tmp_path / "numbers", stored), prompts_of()
        sampling = Sampling(temperature=0, max_tokens=20, ignore_eos=True)
        requests = [
            Request(id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling) for i, prompt in enumerate(prompts)
        ]

        actual = logits_of(load(file, 160), prompts, block_size=16, chunk=50)
        outcome = run(file, requests, dtype="float32")

        expected = logits_of(load(numbers, 160), prompts, block_size=16, chunk=50)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))
        assert outcome.token_ids == run(numbers, requests, dtype="float32").token_ids

    def test_when_it_stays_packed_then_it_takes_and_reads_what_doctor_says(self, tmp_path: Path) -> None:
        TinyModel("qwen3_moe", PACKED["qwen3_moe"] | {"vocab_size": 128, "num_experts_per_tok": 1}).save(tmp_path)
        file = tmp_path / "model.gguf"
        write_model(tmp_path, file, gguf.GGMLQuantizationType.Q4_0, {})
        decoder = load_packed(file)

        needs = needs_of(plan_load(ModelOptions(path=file, max_model_len=64)))

        kept = [*decoder.weights.products, decoder.weights.embedding]
        num_bytes = sum(each.num_bytes for each in kept if isinstance(each, NativeLinear))
        attention, expert, end = 64 * (2 * 4 * 32 + 2 * 2 * 32), 3 * 64 * 64, 128 * 64
        assert needs.num_parameters == 3 * (attention + 4 * expert) + 2 * end
        assert needs.weight_bytes == pytest.approx(num_bytes, rel=0.05)
        assert needs.read_bytes == pytest.approx((3 * (attention + expert) + end) * 20 / 32, rel=0.05)


class TestGivenAMixtureThatContradictsItself:
    """As a damaged file, or one that was edited, may do."""

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_local_experts": 6}, r"'blk.0.ffn_gate_inp.weight' is \(5, 48\), .* expect \(6, 48\)"),
            ({"num_experts_per_tok": 6}, "num_experts_per_tok must be a whole number from 1 to 5, got 6"),
            ({"intermediate_size": 64}, r"'blk.0.ffn_gate_exps.weight' is \(5, 80, 48\), .* expect \(5, 64, 48\)"),
            ({"num_local_experts": 0}, "has no tensor blk.0.ffn_gate.weight"),
        ],
    )
    def test_when_a_field_is_not_that_of_the_tensors_then_a_sentence_says_so(
        self, fields: dict[str, object], message: str, tmp_path: Path
    ) -> None:
        TINY_MODELS["mixtral"].save(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        write_model(tmp_path, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32, {})

        with pytest.raises(ModelFolderError, match=message):
            load(tmp_path / "model.gguf", 160)

    @pytest.mark.parametrize(
        ("family", "lost", "message"),
        [
            ("mixtral", "experts.4.w1", r"'blk.0.ffn_gate_exps.weight' is \(4, 80, 48\), .* expect \(5, 80, 48\)"),
            ("mixtral", "gate", "has no tensor blk.0.ffn_gate_inp.weight"),
            ("granitemoe", "output_linear", "has no tensor model.layers.0.block_sparse_moe"),
        ],
    )
    def test_when_a_tensor_is_not_whole_then_a_sentence_names_it(
        self, family: str, lost: str, message: str, tmp_path: Path
    ) -> None:
        TINY_MODELS[family].save(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors[f"model.layers.0.block_sparse_moe.{lost}.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        write_model(tmp_path, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32, FIELDS.get(family, {}))

        with pytest.raises(ModelFolderError, match=message):
            load(tmp_path / "model.gguf", 160)
