"""Tensors of a GGUF by their names in transformers, in the form that transformers has them in."""

import re
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.gguf.dequantize import plain_dtype
from sluice.engine.gguf.file import GgufFile, TensorInfo, Value
from sluice.engine.gguf.grouped import packed_bits, packed_bytes
from sluice.engine.gguf.tensors import read_grouped, read_tensor
from sluice.engine.models.families import FAMILIES, BlockNorms
from sluice.engine.models.gguf_config import architecture_of
from sluice.engine.models.mixtures import ExpertRules
from sluice.kernels.linear.grouped import GroupedWeight
from sluice.kernels.linear.words import WordForm

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)")
_HALVES = {"ffn_gate_exps": 0, "ffn_up_exps": 1}
"""Which half of `ffn_gate_up_exps` is what other files have as a tensor of its own."""


class _Place(NamedTuple):
    """Where a tensor is in the file."""

    stored: str
    expert: int | None = None
    """Which part of a tensor that stacks those of all experts."""

    half: int | None = None
    """Which half of the rows of the gate and up projections in one."""


class GgufWeights:
    """Weights of one file. See `Weights`."""

    def __init__(self, file: GgufFile, model_type: str) -> None:
        self._file = file
        self._architecture = architecture_of(file)
        family = FAMILIES[model_type]
        self._parts = _PARTS | _norm_names(family.norms, self._architecture.mlp_norm) | _expert_names(family.experts)

    @property
    def files(self) -> list[Path]:
        """The file."""
        return [self._file.path]

    @property
    def description(self) -> str:
        """Types of the matrices, the most frequent first."""
        types = Counter(info.type.name for info in self._file.tensors.values() if len(info.shape) > 1)
        names = ", ".join(name for name, _ in types.most_common())
        return f"GGUF of {names}"

    @property
    def packed_bytes(self) -> int:
        """What matrices in blocks take as groups."""
        return sum(packed_bytes(info.type, prod(info.shape)) for info in self._file.tensors.values())

    @property
    def packed_elements(self) -> int:
        """Their elements."""
        sizes = [(info.type, prod(info.shape)) for info in self._file.tensors.values()]
        return sum(size for kind, size in sizes if packed_bytes(kind, size))

    @property
    def word_forms(self) -> frozenset[WordForm]:
        """See `Weights`."""
        bits = (packed_bits(info.type) for info in self._file.tensors.values() if len(info.shape) > 1)
        return frozenset(WordForm.of_groups(num_bits) for num_bits in bits if num_bits)

    @property
    def dequantized(self) -> str:
        """Nothing: types that groups cannot hold are rounded to them."""
        return ""

    def with_float8(self) -> "GgufWeights":
        """See `Weights`."""
        return self

    def header_bytes(self, file: Path) -> int:
        """Bytes of the file before its tensors."""
        return self._file.header_bytes

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in `dtype`.

        Raises:
            ModelFolderError: it is missing, cannot be read, or is not of `shape`.
        """
        stored, info = self._checked(name, shape)
        is_norm = self._architecture.has_whole_norms and name.endswith("norm.weight")
        with _as_folder_error(stored, self._file.path):
            # The difference to one is small: it must not be made of rounded numbers.
            tensor = read_tensor(self._file.path, info, torch.float32 if is_norm else dtype or torch.float32)
        if is_norm:
            return (tensor - 1).to(dtype or torch.float32)
        return self._in_halves(tensor, name)

    def stored(self, name: str) -> Tensor:
        """Refuse: no tensor here is read so."""
        raise ModelFolderError(f"tensor {name!r} of {self._file.path} is not read as it is stored.")

    def packed(self, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See `Weights`."""
        stored, info = self._checked(name, shape)
        with _as_folder_error(stored, self._file.path):
            weight = read_grouped(self._file.path, info)
        return None if weight is None else weight.map(lambda part: self._in_halves(part, name))

    def _in_halves(self, rows: Tensor, name: str) -> Tensor:
        """Return the rows of a projection of queries or keys so that a rotated pair is elements i and i + R / 2."""
        if self._architecture.has_adjacent_pairs and (heads := self._num_heads(name)):
            return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        return rows

    def _checked(self, name: str, shape: tuple[int, ...]) -> tuple[str, TensorInfo]:
        """Return the name of a tensor in the file, and where that of `shape` is: of an expert, a part of it."""
        stored, expert, half = self._place(name)
        info, expected = self._file.tensors[stored], shape if half is None else (2 * shape[0], *shape[1:])
        if expert is not None:
            expected = (self._field("expert_count"), *expected)
        if (1, *info.shape) == expected:
            # llama.cpp's converter leaves out a first dimension of one.
            info = replace(info, shape=(1, *info.shape))
        if info.shape != expected:
            raise ModelFolderError(
                f"tensor {stored!r} is {info.shape}, the fields of {self._file.path} expect {expected}."
            )
        info = info if expert is None else info.part(expert)
        return stored, info if half is None else info.half(half)

    def num_rows(self, name: str) -> int:
        """See `Weights`."""
        try:
            stored, _, half = self._place(name)
        except ModelFolderError:
            return 0
        return self._file.tensors[stored].shape[-2:][0] // (1 if half is None else 2)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored; bfloat16 if it is quantized."""
        return plain_dtype(self._file.tensors[self._place(name).stored].type) or torch.bfloat16

    def _place(self, name: str) -> _Place:
        """Return where a tensor is.

        Raises:
            ModelFolderError: it is missing.
        """
        base, _, kind = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        expert, layer = _EXPERT.search(base), _LAYER.fullmatch(_EXPERT.sub("", base))
        part = self._parts.get(layer[2]) if layer else _WHOLE.get(base)
        block = f"blk.{layer[1]}." if layer else ""
        if part is None:
            places = []
        elif expert is None:
            places = [_Place(f"{block}{part}.{kind}")]
        else:
            places = list(_places_of_expert(block, part, kind, int(expert[1])))
        for place in places:
            if place.stored in self._file.tensors:
                return place
        missing = places[0].stored if places else name
        raise ModelFolderError(f"{self._file.path} has no tensor {missing}: it does not belong to its fields.")

    def _field(self, name: str) -> "Value | None":
        """Return a field of the architecture."""
        return self._file.metadata.get(f"{self._file.metadata['general.architecture']}.{name}")

    def _num_heads(self, name: str) -> int:
        """Return the heads of a projection of queries or keys; 0 for another tensor."""
        for projection, suffix in (("q_proj", ""), ("k_proj", "_kv")):
            if f".{projection}." in name:
                heads = self._field(f"attention.head_count{suffix}") or self._field("attention.head_count")
                return heads if isinstance(heads, int) else 0
        return 0


@contextmanager
def _as_folder_error(stored: str, path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ModelFolderError(f"tensor {stored!r} of {path} cannot be read: {error}.") from error


def _norm_names(norms: BlockNorms, mlp: str) -> dict[str, str]:
    names = {
        norms.attention: "attn_norm",
        norms.attention_post: "post_attention_norm",
        norms.mlp: mlp,
        norms.mlp_post: "post_ffw_norm",
    }
    return {name: stored for name, stored in names.items() if name is not None}


def _places_of_expert(block: str, part: str, kind: str, expert: int) -> Iterator[_Place]:
    """Yield where a file may have a tensor of an expert, `part` being the name of that of all."""
    yield _Place(f"{block}{part}.{kind}", expert)
    if part in _HALVES:
        yield _Place(f"{block}ffn_gate_up_exps.{kind}", expert, _HALVES[part])
    # Mixtral's files of before March 2024.
    yield _Place(f"{block}{part.removesuffix('_exps')}.{expert}.{kind}")


def _expert_names(rules: ExpertRules | None) -> dict[str, str]:
    """Return the names of a router and of experts; those of all experts are one tensor."""
    if rules is None:
        return {}
    block, shared = rules.block, f"{rules.block}.{rules.shared}"
    names = {f"{block}.{rules.router}": "ffn_gate_inp", f"{shared}_gate": "ffn_gate_inp_shexp"}
    for name, stored in zip((*rules.gate_up, rules.down), ("ffn_gate", "ffn_up", "ffn_down"), strict=True):
        names |= {f"{block}.experts.{name}": f"{stored}_exps", f"{shared}.{name}": f"{stored}_shexp"}
    return names
