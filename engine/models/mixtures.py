"""Families whose layers have experts: how their configs state the sizes, and how the tensors are named."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.config_fields import integer, positive, switch
from sluice.engine.models.weights import Weights
from sluice.engine.quantized.mxfp4 import mxfp4_matrix
from sluice.engine.text.json_files import Json
from sluice.kernels.decoder_shape import MixtureShape
from sluice.kernels.linear.stored import CodedWeight
from sluice.kernels.linear.words import WordForm

_OF_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRules:
    """How a family's experts are described."""

    shape: Callable[[Json, int], MixtureShape]
    """Their sizes, given the number of layers."""

    stacked: "Callable[[Weights, ExpertTensor], Tensor] | None" = None
    """Reads a tensor of one expert from those of all; None if each has its own."""

    block: str = "mlp"
    """The part of a layer that holds router and experts."""

    router: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Gate and up projection of an expert; one name if they are one tensor."""

    down: str = "down_proj"
    shared: str = "shared_expert"
    """The expert that computes every row, if there is one; its gate is named after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor:
    """A tensor of one expert."""

    block: str
    """With the name of the layer."""

    expert: int
    num_experts: int
    part: str
    """Such as `down_proj.weight`."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class UnstackedExperts:
    """Weights whose experts are stored as tensors of all, by the names that each would have. See `Weights`."""

    def __init__(self, weights: Weights, num_experts: int, read: Callable[[Weights, ExpertTensor], Tensor]) -> None:
        self._weights = weights
        self._num_experts = num_experts
        self._read = read

    @property
    def files(self) -> list[Path]:
        """See `Weights`."""
        return self._weights.files

    @property
    def description(self) -> str:
        """See `Weights`."""
        return self._weights.description

    @property
    def packed_bytes(self) -> int:
        """See `Weights`."""
        return self._weights.packed_bytes

    @property
    def packed_elements(self) -> int:
        """See `Weights`."""
        return self._weights.packed_elements

    @property
    def word_forms(self) -> frozenset[WordForm]:
        """See `Weights`."""
        return self._weights.word_forms

    @property
    def dequantized(self) -> str:
        """See `Weights`."""
        return self._weights.dequantized

    def with_float8(self) -> Weights:
        """See `Weights`."""
        return self

    def header_bytes(self, file: Path) -> int:
        """See `Weights`."""
        return self._weights.header_bytes(file)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `Weights`."""
        if (found := _OF_EXPERT.fullmatch(name)) is None:
            return self._weights.get(name, shape, dtype)
        tensor = ExpertTensor(
            block=found[1],
            expert=int(found[2]),
            num_experts=self._num_experts,
            part=found[3],
            shape=shape,
            dtype=dtype,
        )
        return self._read(self._weights, tensor)

    def stored(self, name: str) -> Tensor:
        """See `Weights`."""
        return self._weights.stored(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> CodedWeight | None:
        """See `Weights`."""
        return None if _OF_EXPERT.fullmatch(name) else self._weights.packed(name, shape)

    def num_rows(self, name: str) -> int:
        """See `Weights`."""
        return self._weights.num_rows(name)

    def dtype_of(self, name: str) -> torch.dtype:
        """See `Weights`."""
        return self._weights.dtype_of(name)


def by_expert(weights: Weights, shape: MixtureShape | None, rules: ExpertRules | None) -> Weights:
    """Return weights in which each expert has tensors of its own."""
    if shape is None or rules is None or rules.stacked is None:
        return weights
    first = f"model.layers.{shape.layers.index(True)}.{rules.block}.experts.0.{rules.down}.weight"
    if weights.num_rows(first):
        return weights
    return UnstackedExperts(weights, shape.num_experts, rules.stacked)


def _granite_tensor(weights: Weights, tensor: ExpertTensor) -> Tensor:
    if tensor.part == "down_proj.weight":
        every = (tensor.num_experts, *tensor.shape)
        return weights.get(f"{tensor.block}.output_linear.weight", every, tensor.dtype)[tensor.expert]
    size, hidden = tensor.shape
    gate_up = weights.get(f"{tensor.block}.input_linear.weight", (tensor.num_experts, 2 * size, hidden), tensor.dtype)
    return gate_up[tensor.expert][:size] if tensor.part == "gate_proj.weight" else gate_up[tensor.expert][size:]


def _num_experts(config: Json, default: int) -> int:
    """Return the number of experts, which not all releases of transformers call the same."""
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return integer(config, name, default, most=2**15)


def _gpt_oss_tensor(weights: Weights, tensor: ExpertTensor) -> Tensor:
    """Read a tensor of gpt-oss: in MXFP4, or transposed. The rows of gate and up projection alternate."""
    part, _, kind = tensor.part.rpartition(".")
    stacked, step = ("down_proj", 1) if part == "down_proj" else ("gate_up_proj", 2)
    name, rows = f"{tensor.block}.experts.{stacked}", slice(int(part == "up_proj"), None, step)
    every = (tensor.num_experts, step * tensor.shape[0], *tensor.shape[1:])
    if kind == "bias":
        return weights.get(f"{name}_bias", every, tensor.dtype)[tensor.expert, rows]
    if weights.num_rows(f"{name}_blocks"):
        blocks, scales = weights.stored(f"{name}_blocks"), weights.stored(f"{name}_scales")
        return mxfp4_matrix(name, blocks, scales, (tensor.expert, rows), every).to(tensor.dtype or torch.float32)
    return weights.get(name, (every[0], every[2], every[1]), tensor.dtype)[tensor.expert].T[rows]


def _gpt_oss(config: Json, num_layers: int) -> MixtureShape:
    for name, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if positive(config, name, value) != value:
            raise ModelFolderError(f"config.json: {name} must be {value}, got {config[name]!r}.")
    num_experts = _num_experts(config, 128)
    return MixtureShape(
        layers=(True,) * num_layers,
        num_experts=num_experts,
        num_chosen=integer(config, "num_experts_per_tok", 4, most=num_experts),
        intermediate_size=integer(config, "intermediate_size"),
        has_bias=True,
    )


def _every_layer(config: Json, num_layers: int) -> MixtureShape:
    """Return the sizes of Mixtral and Granite, all of whose layers have experts."""
    num_experts = _num_experts(config, 8)
    return MixtureShape(
        layers=(True,) * num_layers,
        num_experts=num_experts,
        num_chosen=integer(config, "num_experts_per_tok", 2, most=num_experts),
        intermediate_size=integer(config, "intermediate_size"),
    )


def _qwen2(config: Json, num_layers: int) -> MixtureShape:
    shared = integer(config, "shared_expert_intermediate_size", 5632)
    return _qwen(config, num_layers, defaults=(60, 4, 1408), shared_size=shared)


def _qwen3(config: Json, num_layers: int) -> MixtureShape:
    return _qwen(config, num_layers, defaults=(128, 8, 768))


def _qwen(config: Json, num_layers: int, *, defaults: tuple[int, int, int], shared_size: int = 0) -> MixtureShape:
    """Return the sizes of Qwen's mixtures, given defaults: numbers of experts and of chosen ones, and their size."""
    num_experts = _num_experts(config, defaults[0])
    return MixtureShape(
        layers=_qwen_layers(config, num_layers),
        num_experts=num_experts,
        num_chosen=integer(config, "num_experts_per_tok", defaults[1], most=num_experts),
        intermediate_size=integer(config, "moe_intermediate_size", defaults[2]),
        shared_size=shared_size,
        is_normalised=switch(config, "norm_topk_prob"),
    )


def _qwen_layers(config: Json, num_layers: int) -> tuple[bool, ...]:
    """Return the layers with experts: each `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
    step, dense = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in cast("list[object]", dense)):
        raise ModelFolderError(f"config.json: mlp_only_layers must be a list of layers, got {dense!r}.")
    return tuple(layer not in dense and not (layer + 1) % step for layer in range(num_layers))


MIXTRAL_EXPERTS = ExpertRules(shape=_every_layer, block="block_sparse_moe", gate_up=("w1", "w3"), down="w2")
GRANITE_EXPERTS = ExpertRules(
    shape=_every_layer,
    stacked=_granite_tensor,
    block="block_sparse_moe",
    router="router.layer",
)
GPT_OSS_EXPERTS = ExpertRules(shape=_gpt_oss, stacked=_gpt_oss_tensor, router="router")
QWEN2_EXPERTS = ExpertRules(shape=_qwen2)
QWEN3_EXPERTS = ExpertRules(shape=_qwen3)
