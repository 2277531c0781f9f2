"""Open a model: a folder with config.json, generation_config.json and safetensors, or a GGUF. Without transformers."""

from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

from sluice.engine.errors import ModelFolderError
from sluice.engine.gguf.file import GgufFile, find_gguf, read_gguf
from sluice.engine.models.families import text_part
from sluice.engine.models.gguf_config import config_of, generation_config_of
from sluice.engine.models.gguf_weights import GgufWeights
from sluice.engine.models.quantized_weights import QuantizedWeights
from sluice.engine.models.safetensors_weights import SafetensorsWeights
from sluice.engine.models.weights import DTYPES, Weights
from sluice.engine.quantized.config import format_of
from sluice.engine.text.json_files import Json, read_json
from sluice.kernels.philox import NOISE_VERSION

SEMANTICS_VERSION = 2
"""Raised when the same folder and the same job would make other outputs."""

NO_TOKEN = -1
"""In some configs, the id of a token that the model does not have."""

_FULLY_HASHED_BYTES = 256 * 2**20
_SAMPLE_BYTES = 64 * 2**10
_NUM_SAMPLES = 256
_HASHED_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model's configs, and its weights by name."""

    path: Path
    """A folder, or a GGUF."""

    config: Json
    """That of the text part."""

    generation_config: Json
    weights: Weights

    def eos_token_ids(self, vocab_size: int) -> frozenset[int]:
        """Return the end tokens that `eos_source` names.

        Raises:
            ModelFolderError: one of them is not a token of the model.
        """
        stated = (self.config if self.eos_source == "config.json" else self.generation_config).get("eos_token_id")
        ids = cast("list[object]", stated) if isinstance(stated, list) else [stated]
        for token_id in ids:
            is_number = isinstance(token_id, int) and not isinstance(token_id, bool)
            if stated is not None and not (is_number and NO_TOKEN <= cast("int", token_id) < vocab_size):
                raise ModelFolderError(
                    f"{self.eos_source}: eos_token_id must be a token id below {vocab_size}, a list of such ids, or "
                    f"{NO_TOKEN} for none, got {stated!r}."
                )
        return frozenset(cast("list[int]", ids)) - {NO_TOKEN, None}

    @property
    def eos_source(self) -> str:
        """The config that names end tokens: the generation config, else the model's."""
        return "config.json" if self.generation_config.get("eos_token_id") is None else "generation_config.json"

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype to compute in: that of `name`, or for "auto" that of the weights.

        Raises:
            ModelFolderError: `name` is unknown.
        """
        if name == "auto":
            return self.weights.dtype_of("model.embed_tokens.weight")
        if name not in DTYPES:
            raise ModelFolderError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}.")
        return DTYPES[name]

    def fingerprint(
        self,
        dtype: torch.dtype,
        *,
        scheme: str = "",
        cache: str = "",
        kernels: str = "",
        angles_for: int | None = None,
    ) -> str:
        """Hash everything tokens depend on but what a job brings: weights, tokenizer, template, dtype, noise version.

        A job brings the end tokens and sampling defaults that it was begun with, so generation_config.json is left out.

        `scheme` is how weights are kept if not in `dtype` (`WeightForm.scheme`): rounded ones differ from the folder's,
        and packed ones have other products. `cache` is the form of keys and values if it is not `dtype`. `kernels`
        names those of a GPU (`kernels/chain.py`): others may round differently. `angles_for` is the longest sequence,
        if the rotary angles depend on it.

        The release of llguidance is part of it, though only jobs with a grammar depend on it: a queue whose jobs wait
        for the same model compares one fingerprint a worker.

        Small weights are hashed completely; for large ones the headers, the sizes and 256 samples of 64 KiB per file.
        """
        kept = (f" {scheme}" if scheme else "") + (f" {cache} cache" if cache else "")
        kept += f" kernels {kernels}" if kernels else ""
        kept += f" angles for {angles_for}" if angles_for is not None else ""
        versions = f"noise {NOISE_VERSION} semantics {SEMANTICS_VERSION} grammars {_version('llguidance')}"
        digest = sha256(f"{dtype}{kept} {versions}".encode())
        for name in _HASHED_FILES:
            path = self.path / name
            digest.update(f"\0{name}\0".encode())
            digest.update(path.read_bytes() if path.is_file() else b"")
        for path in self.weights.files:
            _hash_weights(digest, path, self.weights.header_bytes(path))
        return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def open_model_folder(path: Path) -> ModelFolder:
    """Open a folder in Hugging Face's layout, a GGUF, or a folder with one.

    Raises:
        ModelFolderError: the folder or a file in it is missing or corrupt.
    """
    if (gguf := find_gguf(path)) is not None:
        return _open_gguf(read_gguf(gguf))
    if not path.is_dir():
        raise ModelFolderError(f"{path} is not a folder: give the path of a folder with config.json and *.safetensors.")
    config = text_part(_read_json(path / "config.json"))
    stored_format, tensors = format_of(config), SafetensorsWeights(path)
    return ModelFolder(
        path=path,
        config=config,
        generation_config=read_json(path / "generation_config.json"),
        weights=tensors if stored_format is None else QuantizedWeights(tensors, stored_format),
    )


def _open_gguf(file: GgufFile) -> ModelFolder:
    config = config_of(file)
    return ModelFolder(
        path=file.path,
        config=config,
        generation_config=generation_config_of(file),
        weights=GgufWeights(file, str(config["model_type"])),
    )


def _read_json(path: Path) -> Json:
    if not path.is_file():
        raise ModelFolderError(f"{path.parent} has no {path.name}: it is not a model folder.")
    return read_json(path)


def _hash_weights(digest: Any, path: Path, header_bytes: int) -> None:  # noqa: ANN401 - hashlib's type has no public name
    """Add one file to `digest`: all of it if small, else size, head and evenly spaced samples."""
    size = path.stat().st_size
    digest.update(f"\0{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        if size <= _FULLY_HASHED_BYTES:
            while chunk := file.read(2**22):
                digest.update(chunk)
            return
        file.seek(8)
        digest.update(file.read(header_bytes - 8))
        for sample in range(_NUM_SAMPLES):
            file.seek(header_bytes + (size - header_bytes - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
