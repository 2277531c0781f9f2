"""Loading takes little more memory than what stays: the peak of a process of its own."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.kernels.native import library
from tests.engine.quantized.writing import awq, write_folders
from tests.grids import fast_only

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 16_000, 512, 1408, 24, 8, 2, 64
CONFIG: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
MOST = 1.1
"""Times what stays."""

CASES = {
    "bfloat16": ("plain", "auto"),
    "bfloat16, rounded to 4 bits": ("plain", "int4"),
    "bfloat16, rounded to int8": ("plain", "int8"),
    "AWQ, packed": ("awq/quantized", "auto"),
    "AWQ, dequantized": ("awq/quantized", "none"),
    "GGUF, packed": ("Q4_0.gguf", "auto"),
    "GGUF, dequantized": ("Q4_0.gguf", "none"),
    "GGUF in bfloat16": ("BF16.gguf", "auto"),
}
PROGRAM = """
import gc, sys
from pathlib import Path
import torch
from sluice.engine.execution.memory import give_memory_back, peak_bytes
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.kernels.linear import pack_linear

torch.set_num_threads(1)
cpu = torch.device("cpu")
# What a first product loads is not the model's.
pack_linear(torch.randn(64, 64).bfloat16())(torch.randn(1, 64).bfloat16())
folder = open_model_folder(Path(sys.argv[1]))
kept = []

def load():
    form = WeightForm(torch.bfloat16, cpu, quantization=sys.argv[2])
    with torch.inference_mode():
        kept.append(
            load_decoder(parse_config(folder.config), folder.weights, form=form, max_model_len=64, max_tokens=8)
        )

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

give_memory_back(cpu)
before = resident()
peak = peak_bytes(cpu, load)
gc.collect()
give_memory_back(cpu)
print(peak, resident() - before)
"""


def write_plain(folder: Path) -> None:
    """A model of 79 million elements in its layers, and 16 million at its ends."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(0.03).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in sizes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    """A folder in bfloat16. Others are made of it when they are tried."""
    folder = Path(mkdtemp(prefix="sluice-memory-"))
    write_plain(folder / "plain")
    yield folder
    shutil.rmtree(folder)


def made(models: Path, name: str) -> Path:
    if (models / name).exists():
        return models / name
    if name.startswith("awq"):
        write_folders(models / "plain", awq(128), models / "awq")
        return models / name
    gguf = pytest.importorskip("gguf")
    from tests.engine.gguf.writing import write_model

    (models / "wide").mkdir(exist_ok=True)
    save_file(
        {each: tensor.float() for each, tensor in load_file(models / "plain" / "model.safetensors").items()},
        models / "wide" / "model.safetensors",
    )
    shutil.copy(models / "plain" / "config.json", models / "wide")
    write_model(models / "wide", models / name, gguf.GGMLQuantizationType[name.removesuffix(".gguf")], {})
    return models / name


class TestGivenAModelOfMiddleSize:
    @pytest.mark.parametrize(
        "case", fast_only(["bfloat16, rounded to 4 bits"], [case for case in CASES if "4" not in case])
    )
    def test_when_it_is_loaded_then_the_peak_is_little_above_what_stays(self, case: str, models: Path) -> None:
        if library() is None:
            pytest.skip("there is no C compiler")
        name, quantization = CASES[case]

        result = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, str(made(models, name)), quantization],
            capture_output=True, text=True, check=True,
        )  # fmt: skip

        peak, stays = map(int, result.stdout.split())
        assert stays < peak < MOST * stays
