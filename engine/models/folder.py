"""Read a model folder: config.json, generation_config.json and safetensors, in one file or in shards.

Weights are memory-mapped: a tensor's bytes are read from the file when they are used. Does not use transformers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.families import text_part
from sluice.engine.text.json_files import Json, read_json
from sluice.kernels.philox import NOISE_VERSION

SEMANTICS_VERSION = 2
"""Raised when the same folder and the same job would make other outputs."""

NO_TOKEN = -1
"""In some configs, the id of a token that the model does not have."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TEXT_PREFIX = re.compile(r"^language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.")
"""What the names of a text part's tensors have besides: `language_model.model.…` or `model.language_model.…`."""

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files of the weights: in one, or the index of several."""

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


class Weights:
    """Tensors by name, over all files of a folder. The text part of a larger model has the names of a model by itself.

    Each tensor is a separate mapping of its file: its pages leave memory with the tensor.
    """

    def __init__(self, folder: Path) -> None:
        self._files = _weight_files(folder)
        self._tensors: dict[str, tuple[Path, str]] = {}
        for path in self._files:
            self._tensors |= {_TEXT_PREFIX.sub("", name): (path, name) for name in _open(path).keys()}  # noqa: SIM118 - not a dict

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, in order of name."""
        return self._files

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor called `name`, memory-mapped.

        Raises:
            ModelFolderError: it is missing, corrupt, or not of `shape`.
        """
        if name not in self._tensors:
            raise ModelFolderError(f"the weights have no tensor {name!r}: they do not belong to this config.json.")
        try:
            path, stored_name = self._tensors[name]
            tensor = cast("Tensor", _open(path).get_tensor(stored_name))
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"tensor {name!r} cannot be read: {error}.") from error
        if tuple(tensor.shape) != shape:
            raise ModelFolderError(f"tensor {name!r} is {tuple(tensor.shape)}, config.json expects {shape}.")
        if tensor.dtype not in _DTYPES.values():
            raise ModelFolderError(
                f"tensor {name!r} is {tensor.dtype}; only fp32, fp16 and bf16 weights are supported."
            )
        return tensor

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which `name` is stored."""
        if name not in self._tensors:
            raise ModelFolderError(f"the weights have no tensor {name!r}: they do not belong to this config.json.")
        path, stored_name = self._tensors[name]
        return cast("torch.dtype", _open(path).get_slice(stored_name)[:1].dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model folder's configs, and its weights by name."""

    path: Path
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
        if name not in _DTYPES:
            raise ModelFolderError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}.")
        return _DTYPES[name]

    def fingerprint(
        self,
        dtype: torch.dtype,
        *,
        is_int8: bool = False,
        has_fp8_cache: bool = False,
        kernels: str = "",
        angles_for: int | None = None,
    ) -> str:
        """Hash everything tokens depend on but what a job brings: weights, tokenizer, template, dtype, noise version.

        A job brings the end tokens and sampling defaults that it was begun with, so generation_config.json is left out.

        Weights rounded to int8 differ from the folder's, and keys and values in fp8 from the model's. `kernels` names
        those of a GPU (`kernels/chain.py`): others may round differently. `angles_for` is the longest sequence, if the
        rotary angles depend on it.

        The release of llguidance is part of it, though only jobs with a grammar depend on it: a queue whose jobs wait
        for the same model compares one fingerprint a worker.

        Small weights are hashed completely; for large ones the headers, the sizes and 256 samples of 64 KiB per file.
        """
        kept = (" int8" if is_int8 else "") + (" fp8 cache" if has_fp8_cache else "")
        kept += f" kernels {kernels}" if kernels else ""
        kept += f" angles for {angles_for}" if angles_for is not None else ""
        versions = f"noise {NOISE_VERSION} semantics {SEMANTICS_VERSION} grammars {_version('llguidance')}"
        digest = sha256(f"{dtype}{kept} {versions}".encode())
        for name in _HASHED_FILES:
            path = self.path / name
            digest.update(f"\0{name}\0".encode())
            digest.update(path.read_bytes() if path.is_file() else b"")
        for path in self.weights.files:
            _hash_weights(digest, path)
        return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def open_model_folder(path: Path) -> ModelFolder:
    """Open a folder in Hugging Face's layout.

    Raises:
        ModelFolderError: the folder or a file in it is missing or corrupt.
    """
    if not path.is_dir():
        raise ModelFolderError(f"{path} is not a folder: give the path of a folder with config.json and *.safetensors.")
    config = text_part(_read_json(path / "config.json"))
    generation_config = read_json(path / "generation_config.json")
    return ModelFolder(path=path, config=config, generation_config=generation_config, weights=Weights(path))


def _read_json(path: Path) -> Json:
    if not path.is_file():
        raise ModelFolderError(f"{path.parent} has no {path.name}: it is not a model folder.")
    return read_json(path)


def _weight_files(folder: Path) -> list[Path]:
    index_path = folder / INDEX
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise ModelFolderError(f"{index_path} has no weight_map.")
        names = {str(name) for name in cast("Mapping[str, object]", weight_map).values()}
        files = [folder / name for name in sorted(names)]
    else:
        # Beside it there may be the same weights in the form of another program.
        whole = folder / WHOLE
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelFolderError(f"{folder} lacks {', '.join(missing)}, which its index lists.")
    if not files:
        raise ModelFolderError(f"{folder} has no *.safetensors: only weights in that format are supported.")
    return files


def _open(path: Path) -> Any:  # noqa: ANN401 - safe_open has no types
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"{path} is corrupt or truncated: {error}.") from error


def _hash_weights(digest: Any, path: Path) -> None:  # noqa: ANN401 - hashlib's type has no public name
    """Add one file to `digest`: all of it if small, else size, head and evenly spaced samples."""
    size = path.stat().st_size
    digest.update(f"\0{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        if size <= _FULLY_HASHED_BYTES:
            while chunk := file.read(2**22):
                digest.update(chunk)
            return
        header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(header_bytes))
        for sample in range(_NUM_SAMPLES):
            file.seek(8 + header_bytes + (size - 8 - header_bytes - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
