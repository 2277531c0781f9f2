"""Which modules of a model each of its products stacks, by their names in transformers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.engine.models.config import DecoderConfig
from sluice.engine.models.load import half_order
from sluice.kernels.adapters.products import StackedSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedModules:
    """The modules that a product stacks, and their sizes."""

    names: tuple[str, ...]
    sizes: StackedSizes
    order: Tensor | None = None
    """`[N]` int64: which row of the stacked matrices each row of the product is; None: the same."""

    def part_order(self, index: int) -> Tensor | None:
        """Return the order of the rows of one matrix, which a product keeps together."""
        if self.order is None:
            return None
        first = sum(self.sizes.part_sizes[:index])
        return self.order[first : first + self.sizes.part_sizes[index]] - first


def modules_of(config: DecoderConfig) -> list[StackedModules]:
    """Return the modules of the products of all layers, in the order of `DecoderWeights.adapted`."""
    has_experts = (False,) * config.num_layers if config.mixture is None else config.mixture.layers
    return [
        modules
        for index, has_experts_here in enumerate(has_experts)
        for modules in _of_layer(config, f"model.layers.{index}", has_experts=has_experts_here)
    ]


def _of_layer(config: DecoderConfig, prefix: str, *, has_experts: bool) -> list[StackedModules]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = (query, key_value, key_value)
    order = half_order(config) if config.rules.has_adjacent_pairs else None
    if config.rules.is_qkv_fused:
        of_qkv = _stack(attention, {"qkv_proj": sum(qkv)}, hidden, order)
    else:
        of_qkv = _stack(attention, dict(zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True)), hidden, order)
    gate_up = {"gate_up_proj": 2 * inner} if config.rules.is_gate_up_fused else {"gate_proj": inner, "up_proj": inner}
    return [
        of_qkv,
        _stack(attention, {"o_proj": hidden}, query),
        _stack(mlp, {} if has_experts else gate_up, hidden),
        _stack(mlp, {} if has_experts else {"down_proj": hidden}, inner),
    ]


def _stack(prefix: str, sizes: dict[str, int], in_size: int, order: Tensor | None = None) -> StackedModules:
    return StackedModules(
        names=tuple(f"{prefix}.{name}" for name in sizes),
        sizes=StackedSizes(tuple(sizes.values()), in_size),
        order=order if order is None else order.to(torch.int64),
    )
