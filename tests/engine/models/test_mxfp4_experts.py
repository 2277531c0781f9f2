"""Experts of gpt-oss in MXFP4: as transformers dequantizes them, and through the decoder."""

# torch's and transformers' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.models.folder import open_model_folder
from sluice.engine.quantized.mxfp4 import mxfp4_matrix
from tests.oracles.test_decoder_logits import load, logits_of
from tests.oracles.tiny_models import GPT_OSS, TinyModel

MODEL = TinyModel("gpt_oss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2})


def random_blocks(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Every pair of elements, and scales near one: `[*shape, 16]` and `[*shape]`."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """As transformers does it: `[E, K, N]`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small gpt-oss whose experts are in MXFP4."""
    MODEL.save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, in_size, out_size = tensors.pop(name).shape
        blocks, scales = random_blocks(num_experts, out_size, in_size // 32, seed=len(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return tmp_path


class TestGivenBlocks:
    def test_when_they_are_read_then_numbers_are_those_of_transformers(self) -> None:
        blocks, scales = random_blocks(3, 40, 2, seed=1)

        actual = [mxfp4_matrix("x", blocks, scales, (expert, slice(None)), (3, 40, 64)) for expert in range(3)]

        assert torch.equal(torch.stack(actual), dequantized(blocks, scales).transpose(1, 2))

    def test_when_their_shape_is_not_that_of_the_config_then_the_sentence_names_the_tensor(self) -> None:
        blocks, scales = random_blocks(3, 40, 2, seed=1)

        with pytest.raises(ModelFolderError, match=r"'x_scales' is torch.int8 .*, expected uint8 \(3, 40, 2\)"):
            mxfp4_matrix("x", blocks, scales.to(torch.int8), (0, slice(None)), (3, 40, 64))
        with pytest.raises(ModelFolderError, match=r"'x_blocks' is torch.uint8 .*, expected uint8 \(3, 41, 2, 16\)"):
            mxfp4_matrix("x", blocks, scales, (0, slice(None)), (3, 41, 64))


class TestGivenAFolder:
    def test_when_prompts_are_computed_then_logits_are_those_of_the_dequantized_experts(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        model = MODEL.build()
        state = model.state_dict()
        for name in [name for name in tensors if name.endswith("_blocks")]:
            base = name.removesuffix("_blocks")
            state[base].copy_(dequantized(tensors[name], tensors[f"{base}_scales"]))
        prompt = torch.randint(97, (60,), generator=torch.Generator().manual_seed(3)).tolist()

        with torch.inference_mode():
            (actual,) = logits_of(load(folder, max_model_len=160), [prompt], block_size=16, chunk=25)
            expected = model(torch.tensor([prompt])).logits[0]

        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    def test_when_it_is_described_then_it_says_what_becomes_of_them(self, folder: Path) -> None:
        assert open_model_folder(folder).weights.description == "experts in MXFP4, dequantized at load"

    def test_when_the_activation_is_cut_elsewhere_then_it_is_refused(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"swiglu_limit": 6.0}))

        with pytest.raises(ModelFolderError, match=r"swiglu_limit must be 7\.0, got 6\.0"):
            load_model_runner(ModelOptions(path=folder, num_blocks=8))
