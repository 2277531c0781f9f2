"""What a model is said to take before it is loaded, against what it takes then."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from pathlib import Path

import pytest
import torch

from sluice.engine.config import Quantization
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import plan_load
from sluice.engine.execution.start.needs import bandwidth_bytes_per_s, needs_of
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.kernels.linear.native import NativeLinear
from tests.engine.quantized.writing import awq, write_folders
from tests.oracles.tiny_models import TinyModel

SIZES: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def folder_of(out: Path, *, is_tied: bool, is_quantized: bool) -> Path:
    TinyModel("llama", SIZES | {"tie_word_embeddings": is_tied}).save(out / "plain", torch.bfloat16)
    return write_folders(out / "plain", awq(64), out)[0] if is_quantized else out / "plain"


class TestGivenAModelFolder:
    @pytest.mark.parametrize(
        ("quantization", "is_tied", "is_quantized"),
        [
            ("auto", False, False),
            ("auto", True, False),
            ("auto", False, True),
            ("int8", True, False),
            ("int4", False, False),
            ("none", False, True),
        ],
    )
    def test_when_it_is_loaded_then_it_takes_and_reads_what_was_said(
        self, quantization: Quantization, is_tied: bool, is_quantized: bool, tmp_path: Path
    ) -> None:
        folder = folder_of(tmp_path, is_tied=is_tied, is_quantized=is_quantized)
        plan = plan_load(ModelOptions(path=folder, quantization=quantization, max_model_len=64))
        if not plan.form.keeps_packed and quantization == "auto":
            pytest.skip("this machine has no native products")

        needs = needs_of(plan)

        decoder = load_decoder(plan.config, plan.folder.weights, form=plan.form, max_model_len=64, max_tokens=8)
        products = [each for each in decoder.weights.products if isinstance(each, NativeLinear)]
        read = sum(product.num_bytes for product in products)
        embedding = decoder.weights.embedding
        kept = read + (embedding.nbytes if isinstance(embedding, torch.Tensor) else 0)
        layers = 3 * (128 * (2 * 128 + 2 * 64) + 3 * 128 * 256)
        assert needs.num_parameters == layers + 512 * 128 * (1 if is_tied else 2)
        assert needs.weight_bytes == pytest.approx(kept, rel=0.05)
        assert needs.read_bytes == pytest.approx(read, rel=0.05)
        # Keys and values of 3 layers and 2 heads of 32, in bfloat16, of whole blocks.
        assert needs.sequence_bytes == pytest.approx(64 * 3 * 2 * 2 * 32 * 2, rel=0.5)
        assert needs.fits

    @pytest.mark.parametrize(("is_tied", "is_quantized"), [(False, True), (True, False)])
    def test_when_it_is_for_a_gpu_then_a_table_is_counted_in_16_bits_and_products_packed(
        self, is_tied: bool, is_quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if is_quantized:
            folder = folder_of(tmp_path, is_tied=is_tied, is_quantized=True)
        else:
            gguf = pytest.importorskip("gguf")
            from tests.engine.gguf.writing import write_model

            TinyModel("llama", SIZES | {"tie_word_embeddings": True}).save(tmp_path / "plain")
            folder = tmp_path / "model.gguf"
            write_model(tmp_path / "plain", folder, gguf.GGMLQuantizationType.Q4_0, {})
        monkeypatch.setattr(WeightForm, "is_on_gpu", True)
        plan = plan_load(ModelOptions(path=folder, dtype="bfloat16", max_model_len=64))

        needs = needs_of(plan)

        layers, ends = 3 * (128 * (2 * 128 + 2 * 64) + 3 * 128 * 256), 512 * 128
        # Spans of 64 with 5 bytes each, and an output in 16 bits; or groups of 20 bytes.
        kept = layers * 37 // 64 + 2 * ends if is_quantized else (layers + ends) * 20 // 32
        assert plan.form.keeps_packed
        assert needs.read_bytes == pytest.approx(kept, rel=0.02)
        assert needs.weight_bytes == pytest.approx(kept + 2 * ends, rel=0.02)


class TestGivenADevice:
    def test_when_it_is_measured_then_it_reads_bytes(self) -> None:
        assert bandwidth_bytes_per_s(torch.device("cpu")) > 0
