"""Families whose layers have experts: how their configs state the sizes, and how the tensors are named."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.config_fields import integer, switch
from sluice.engine.text.json_files import Json
from sluice.kernels.decoder_shape import MixtureShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRules:
    """How a family's experts are described."""

    shape: Callable[[Json, int], MixtureShape]
    """Their sizes, given the number of layers."""

    block: str = "mlp"
    """The part of a layer that holds router and experts."""

    router: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Gate and up projection of an expert; one name if they are one tensor."""

    down: str = "down_proj"


def _num_experts(config: Json, default: int) -> int:
    """Return the number of experts, which not all releases of transformers call the same."""
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return integer(config, name, default, most=2**15)


def _qwen3(config: Json, num_layers: int) -> MixtureShape:
    num_experts = _num_experts(config, 128)
    return MixtureShape(
        layers=_qwen_layers(config, num_layers),
        num_experts=num_experts,
        num_chosen=integer(config, "num_experts_per_tok", 8, most=num_experts),
        intermediate_size=integer(config, "moe_intermediate_size", 768),
        is_normalised=switch(config, "norm_topk_prob"),
    )


def _qwen_layers(config: Json, num_layers: int) -> tuple[bool, ...]:
    """Return the layers with experts: each `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
    step, dense = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in cast("list[object]", dense)):
        raise ModelFolderError(f"config.json: mlp_only_layers must be a list of layers, got {dense!r}.")
    return tuple(layer not in dense and not (layer + 1) % step for layer in range(num_layers))


QWEN3_EXPERTS = ExpertRules(shape=_qwen3)
