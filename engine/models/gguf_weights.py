"""Tensors of a GGUF by their names in transformers, in the form that transformers has them in."""

import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.gguf.dequantize import plain_dtype
from sluice.engine.gguf.file import GgufFile, TensorInfo, Value
from sluice.engine.gguf.grouped import packed_bytes
from sluice.engine.gguf.tensors import read_grouped, read_tensor
from sluice.engine.models.families import FAMILIES, BlockNorms
from sluice.engine.models.gguf_config import architecture_of
from sluice.engine.models.mixtures import ExpertRules
from sluice.kernels.linear.grouped import GroupedWeight

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
    def dequantized(self) -> str:
        """Nothing: types that groups cannot hold are rounded to them."""
        return ""

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
        stored, expert = self._stored(name)
        info, expected = self._file.tensors[stored], shape if expert is None else (self._field("expert_count"), *shape)
        if (1, *info.shape) == expected:
            # llama.cpp's converter leaves out a first dimension of one.
            info = replace(info, shape=(1, *info.shape))
        if info.shape != expected:
            raise ModelFolderError(
                f"tensor {stored!r} is {info.shape}, the fields of {self._file.path} expect {expected}."
            )
        return stored, info if expert is None else info.part(expert)

    def num_rows(self, name: str) -> int:
        """See `Weights`."""
        try:
            return self._file.tensors[self._stored(name)[0]].shape[-2:][0]
        except ModelFolderError:
            return 0

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored; bfloat16 if it is quantized."""
        return plain_dtype(self._file.tensors[self._stored(name)[0]].type) or torch.bfloat16

    def _stored(self, name: str) -> tuple[str, int | None]:
        """Return the name of a tensor in the file; of one that stacks those of all experts, which of them."""
        base, _, kind = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        expert, layer = _EXPERT.search(base), _LAYER.fullmatch(_EXPERT.sub("", base))
        part = self._parts.get(layer[2]) if layer else _WHOLE.get(base)
        stored = f"blk.{layer[1]}.{part}.{kind}" if layer else f"{part}.{kind}"
        if stored not in self._file.tensors:
            missing = name if part is None else stored
            raise ModelFolderError(f"{self._file.path} has no tensor {missing}: it does not belong to its fields.")
        return stored, int(expert[1]) if expert else None

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


def _expert_names(rules: ExpertRules | None) -> dict[str, str]:
    """Return the names of a router and of experts; those of all experts are one tensor."""
    if rules is None:
        return {}
    block, shared = rules.block, f"{rules.block}.{rules.shared}"
    names = {f"{block}.{rules.router}": "ffn_gate_inp", f"{shared}_gate": "ffn_gate_inp_shexp"}
    for name, stored in zip((*rules.gate_up, rules.down), ("ffn_gate", "ffn_up", "ffn_down"), strict=True):
        names |= {f"{block}.experts.{name}": f"{stored}_exps", f"{shared}.{name}": f"{stored}_shexp"}
    return names
