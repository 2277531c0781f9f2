"""Damaged and hostile headers of safetensors: each folder is loaded or refused with a sentence; pickles stay closed."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import os
import pickle
import random
import re
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from tests.engine.quantized.writing import Scheme, awq, fp8, gptq, write_folders
from tests.grids import fast_only

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
MATRICES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (32, 32),
    "mlp.up_proj": (32, 32),
    "mlp.down_proj": (32, 32),
    "input_layernorm": (32,),
    "post_attention_layernorm": (32,),
}
SCHEMES: dict[str, Scheme | None] = {"plain": None, "gptq": gptq(), "awq": awq(), "fp8": fp8()}
ROOM_BYTES = 256 * 2**20
"""Address space that loading may take: a hostile size is far beyond it."""

NUMBERS = [b"0", b"1", b"-1", b"33", b"64", b"4294967296", b"9223372036854775807", b"18446744073709551616", b"1e9"]
TYPES = [b"F32", b"BF16", b"F8_E4M3", b"I8", b"I32", b"I64", b"U8", b"BOOL", b"F4", b"F64"]


@contextmanager
def little_room() -> Generator[None]:
    """Let a large allocation fail."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def folder_of(out: Path, scheme: Scheme | None) -> Path:
    """A model of one layer."""
    generator = torch.Generator().manual_seed(0)
    (out / "plain").mkdir(parents=True)
    named = {f"model.layers.0.{name}.weight": shape for name, shape in MATRICES.items()}
    named |= {"model.embed_tokens.weight": (16, 32), "model.norm.weight": (32,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in named.items()}
    save_file(tensors, out / "plain" / "model.safetensors")
    (out / "plain" / "config.json").write_text(json.dumps(CONFIG))
    return out / "plain" if scheme is None else write_folders(out / "plain", scheme, out)[0]


def load(folder: Path) -> None:
    """Read everything."""
    opened = open_model_folder(folder)
    form = WeightForm(torch.float32, torch.device("cpu"))
    load_decoder(parse_config(opened.config), opened.weights, form=form, max_model_len=16, max_tokens=4)


def mutated(content: bytes, source: random.Random) -> bytes:
    """Change a header in one to three places, or cut the file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header, data = content[8:end], content[end:]
    size = content[:8]
    for _ in range(source.randrange(1, 4)):
        match source.randrange(6):
            case 0:
                size = source.choice([source.randbytes(8), (end + source.randrange(-20, 20)).to_bytes(8, "little")])
            case 1:
                at = source.randrange(len(header))
                header = header[:at] + source.randbytes(1) + header[at + 1 :]
            case 2:
                header = replaced(header, rb"\d+", source.choice(NUMBERS), source)
            case 3:
                header = replaced(header, rb'"[A-Z]+[0-9_A-Z]*"', b'"' + source.choice(TYPES) + b'"', source)
            case 4:
                first = source.randrange(len(header))
                header = header[:first] + header[first + source.randrange(1, 30) :]
            case _:
                data = data[: source.randrange(len(data))]
    is_told = source.random() < 0.8
    return (len(header).to_bytes(8, "little") if is_told and size == content[:8] else size) + header + data


def replaced(text: bytes, pattern: bytes, by: bytes, source: random.Random) -> bytes:
    """Replace one place that matches."""
    places = list(re.finditer(pattern, text))
    if not places:
        return text
    place = source.choice(places)
    return text[: place.start()] + by + text[place.end() :]


class TestGivenADamagedHeader:
    @pytest.mark.parametrize(
        ("name", "count"), fast_only([(name, 300) for name in SCHEMES], [(name, 10_000) for name in SCHEMES])
    )
    def test_when_it_is_loaded_then_it_is_read_or_refused_within_its_size(
        self, name: str, count: int, tmp_path: Path
    ) -> None:
        folder, source = folder_of(tmp_path, SCHEMES[name]), random.Random(count)
        file = folder / "model.safetensors"
        good, refused = file.read_bytes(), 0
        load(folder)

        with little_room():
            for _ in range(count):
                # Another file: the pages of the last one may be mapped.
                file.unlink()
                file.write_bytes(mutated(good, source))
                try:
                    load(folder)
                except ModelFolderError:
                    refused += 1

        assert refused > count // 2

    @pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
    def test_when_it_is_cut_short_then_a_sentence_says_so(self, kept: int, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, None)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:kept])

        with pytest.raises(ModelFolderError, match="is corrupt or truncated"):
            load(folder)


class Trap:
    """What would make a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._path,))


class TestGivenAPickle:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
    def test_when_a_folder_has_weights_in_no_other_form_then_it_is_refused_unopened(
        self, name: str, tmp_path: Path
    ) -> None:
        folder, trap = folder_of(tmp_path, None), tmp_path / "opened"
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(Trap(trap)))

        with pytest.raises(ModelFolderError, match="only weights in that format are supported"):
            load(folder)

        assert not trap.exists()

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
    def test_when_an_index_or_a_name_leads_to_it_then_it_is_refused_unopened(self, name: str, tmp_path: Path) -> None:
        folder, trap = folder_of(tmp_path, None), tmp_path / "opened"
        names = load_file(folder / "model.safetensors")
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Trap(trap)))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))

        with pytest.raises(ModelFolderError, match="is corrupt or truncated"):
            load(folder)

        assert not trap.exists()
