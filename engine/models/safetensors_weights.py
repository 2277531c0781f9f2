"""Tensors of a folder of safetensors, in one file or in shards, memory-mapped: bytes are read when they are used."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.weights import DTYPES
from sluice.engine.text.json_files import read_json
from sluice.kernels.linear.stored import PackedWeight
from sluice.kernels.linear.words import WordForm

_TEXT_PREFIX = re.compile(r"^language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.")
"""What the names of a text part's tensors have besides: `language_model.model.…` or `model.language_model.…`."""

_BARE = "embed_tokens.weight"
"""A tensor of a model that was saved without an output head, whose names lack the prefix `model.`."""

_HEADER_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Of tensors that are read, by their names in a header."""

_HEADS = ("lm_head.", "score.")

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files of the weights: in one, or the index of several."""


class SafetensorsWeights:
    """Tensors by name, over all files of a folder. The text part of a larger model has the names of a model by itself.

    Each tensor is a separate mapping of its file: its pages leave memory with the tensor.
    """

    def __init__(self, folder: Path) -> None:
        self._files = _weight_files(folder)
        self._tensors: dict[str, tuple[Path, str]] = {}
        for path in self._files:
            self._tensors |= {_TEXT_PREFIX.sub("", name): (path, name) for name in _open(path).keys()}  # noqa: SIM118 - not a dict
        if _BARE in self._tensors:
            self._tensors = {
                name if name.startswith(_HEADS) else f"model.{name}": place for name, place in self._tensors.items()
            }

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, in order of name."""
        return self._files

    @property
    def description(self) -> str:
        """Nothing: the dtype of the model says how they are stored."""
        return ""

    @property
    def packed_bytes(self) -> int:
        """None: these tensors are plain."""
        return 0

    @property
    def packed_elements(self) -> int:
        """None, either."""
        return 0

    @property
    def word_forms(self) -> frozenset[WordForm]:
        """None."""
        return frozenset()

    @property
    def dequantized(self) -> str:
        """Nothing: these tensors are plain."""
        return ""

    def with_float8(self) -> "SafetensorsWeights":
        """See `Weights`."""
        return self

    def header_bytes(self, file: Path) -> int:
        """See `Weights`."""
        with file.open("rb") as opened:
            return 8 + int.from_bytes(opened.read(8), "little")

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor called `name`, memory-mapped.

        Raises:
            ModelFolderError: it is missing, corrupt, or not of `shape`.
        """
        tensor = self.stored(name)
        if tuple(tensor.shape) != shape:
            raise ModelFolderError(f"tensor {name!r} is {tuple(tensor.shape)}, config.json expects {shape}.")
        if tensor.dtype not in DTYPES.values():
            raise ModelFolderError(
                f"tensor {name!r} is {tensor.dtype}; only fp32, fp16 and bf16 weights are supported."
            )
        return tensor

    def stored(self, name: str) -> Tensor:
        """Return the tensor called `name`, memory-mapped, whatever its dtype and shape.

        Raises:
            ModelFolderError: it is missing or corrupt.
        """
        if name not in self._tensors:
            raise ModelFolderError(f"the weights have no tensor {name!r}: they do not belong to this config.json.")
        try:
            path, stored_name = self._tensors[name]
            return cast("Tensor", _open(path).get_tensor(stored_name))
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"tensor {name!r} cannot be read: {error}.") from error

    def form_of(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Return dtype and shape of a tensor, as the header has them; None without it, or if its dtype is not read."""
        if name not in self._tensors:
            return None
        path, stored_name = self._tensors[name]
        view = _open(path).get_slice(stored_name)
        dtype = _HEADER_DTYPES.get(str(view.get_dtype()))
        return None if dtype is None else (dtype, tuple(view.get_shape()))

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedWeight | None:
        """None: these tensors are plain."""
        return None

    def num_rows(self, name: str) -> int:
        """See `Weights`."""
        if name not in self._tensors:
            return 0
        path, stored_name = self._tensors[name]
        return int(_open(path).get_slice(stored_name).get_shape()[0])

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which `name` is stored."""
        if name not in self._tensors:
            raise ModelFolderError(f"the weights have no tensor {name!r}: they do not belong to this config.json.")
        path, stored_name = self._tensors[name]
        return cast("torch.dtype", _open(path).get_slice(stored_name)[:1].dtype)


def _weight_files(folder: Path) -> list[Path]:
    index_path = folder / INDEX
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
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
